"""Reading run folders: growing files, columns, thinning, the index of rollouts, logs, settings."""

import json
import math
import os
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import BEGAN, add_step, append, make_run, rollout, write_logprobs, write_rollouts

from headway.core.records import rollout_step
from headway.core.runs import RunPaths
from headway.monitor.dashboard.catalog import Catalog
from headway.monitor.dashboard.evaluations import round_page, rounds
from headway.monitor.dashboard.index import Filter, RolloutIndex
from headway.monitor.dashboard.logs import PIECE, attempts, line_time, read_piece, search_log
from headway.monitor.dashboard.previews import Previews
from headway.monitor.dashboard.rollouts import (
    find_tokenizer,
    page,
    ratio,
    read_record,
    search,
    view_record,
    view_tokens,
)
from headway.monitor.dashboard.settings import view_settings
from headway.monitor.dashboard.summary import summarize
from headway.monitor.dashboard.table import MetricTable, Thinner
from headway.monitor.dashboard.timeline import lanes, restarts
from headway.monitor.tail import LineTail, last_lines


def test_a_tail_hands_out_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tail = LineTail(path)
    assert list(tail.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(tail.lines()) == [b"one\n"]
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.changed()
    assert list(tail.lines()) == [b"two\n", b"three\n"]
    assert not tail.changed() and list(tail.lines()) == []


def test_a_tail_starts_over_when_the_file_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a\nb\n")
    tail = LineTail(path)
    list(tail.lines())
    (tmp_path / "new").write_bytes(b"a\nc\n")
    (tmp_path / "new").replace(path)
    assert tail.changed()
    assert list(tail.lines()) == [b"a\n", b"c\n"]
    assert tail.replaced


def test_last_lines_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100 + b"\nsecond\nunfinished")
    assert last_lines(path, 60) == [b"second\n"]
    assert last_lines(tmp_path / "none") == []


def test_an_evaluation_joins_the_step_it_belongs_to(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=5)
    path = folder / "metrics" / "orchestrator.jsonl"
    append(path, {"step": 3, "time": BEGAN + 1e6, "eval/held-out/avg": 0.75})
    append(path, {"step": 0, "time": BEGAN, "eval/held-out/avg": 0.25})
    table = MetricTable(path)
    table.refresh()
    chosen = table.select(["eval/held-out/avg", "nothing"], 100)
    assert chosen["step"] == [0, 1, 2, 3, 4, 5]
    assert chosen["columns"] == {"eval/held-out/avg": [0.25, None, None, 0.75, None, None]}
    assert chosen["time"][3] == BEGAN + 26.0, "the step keeps its own time"


def test_a_table_follows_a_resumed_run_and_passes_over_damage(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=4)
    path = folder / "metrics" / "trainer.jsonl"
    table = MetricTable(path)
    table.refresh()
    kept = path.read_bytes().splitlines(keepends=True)[:2]
    (folder / "new").write_bytes(b"".join(kept) + b"not json\n" + b'{"time": 3}\n')
    (folder / "new").replace(path)
    add_step(folder, 3)
    table.refresh()
    assert table.steps().tolist() == [1, 2, 3]


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=300), st.integers(2, 80))
def test_thinning_keeps_extremes_and_length(values: list[float], points: int) -> None:
    column = np.array(values)
    thin = Thinner(len(column), points)
    out, x = thin.extremes(column), thin.ends(np.arange(len(column), dtype=float))
    assert len(out) == len(x) <= max(points, len(column) if thin.whole else 0)
    assert (np.diff(x) >= 0).all()
    if not np.isnan(column).all():
        assert np.nanmin(out) == np.nanmin(column)
        assert np.nanmax(out) == np.nanmax(column)


def test_rollouts_are_indexed_filtered_and_replaced(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1)
    write_rollouts(folder, 1, [rollout(1, 0.0), rollout(1, 1.0, error="timeout")])
    write_rollouts(folder, 2, [rollout(2, 0.5, env="calc", group="aaaaaaaaaaaa22")])
    (folder / "rollouts" / "step_000003.jsonl.gz").write_bytes(b"not gzip")
    index = RolloutIndex(RunPaths(folder))
    index.refresh()
    index.wait()

    def found(**wanted: object) -> list[tuple[int, int]]:
        rows = page(index, Filter(**wanted), 0, 10)["rows"]  # type: ignore[arg-type]
        return [(row["step"], row["line"]) for row in rows]

    assert found() == [(2, 0), (1, 0), (1, 1)]
    assert found(sort="reward") == [(1, 1), (2, 0), (1, 0)]
    assert found(env="calc") == [(2, 0)] and found(env="unknown") == []
    assert found(error="any") == found(error="timeout") == [(1, 1)]
    assert found(group="aaaaaa11") == [(1, 0), (1, 1)]
    assert found(min_reward=0.5, max_reward=0.9) == [(2, 0)]
    write_rollouts(folder, 1, [rollout(1, 0.25)])
    index.refresh(1)
    assert found(step=1) == [(1, 0)]
    assert index.progress()["rollouts"] == 2
    assert np.sum(index.heat("lag", 10, 10)["counts"]) == 2


def test_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1)
    write_rollouts(folder, 1, [rollout(1, say=f'word "{number}"') for number in range(6)])
    index = RolloutIndex(RunPaths(folder))
    index.refresh(1)
    first = search(index, Filter(), 'WORD "', 0, 4)
    rest = search(index, Filter(), 'WORD "', first["next"], 4)
    assert [row["line"] for row in first["rows"] + rest["rows"]] == list(range(6))
    assert rest["next"] is None
    assert search(index, Filter(), 'word "3"', 0, 4)["rows"][0]["line"] == 3


def test_a_record_is_shown_with_its_tokens(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1)
    write_rollouts(folder, 1, [rollout(1, 1.0)])
    index = RolloutIndex(RunPaths(folder))
    record = read_record(index, 1, 0)
    assert view_record(record)["episode"]["traces"][0]["branches"] == [[0, 1, 2]]
    tokens = view_tokens(record, RunPaths(folder), 0, 0, 4, 3)
    assert tokens["total"] == 10 and tokens["advantage"] == 0.5
    assert tokens["logprobs"] == [None, -0.1, -2.0] and tokens["versions"] == [None, 3, 3]
    for wrong in ((1, 5), (9, 0)):
        with pytest.raises(KeyError):
            read_record(index, *wrong)
    with pytest.raises(KeyError):
        view_tokens(record, RunPaths(folder), 0, 7, 0, 5)


def test_ratios_are_joined_by_the_branch_of_a_rollout(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1)
    paths = RunPaths(folder)
    write_rollouts(folder, 1, [rollout(1)])
    record = read_record(RolloutIndex(paths), 1, 0)
    assert view_tokens(record, paths, 0, 0, 0, 10)["ratios"] == [None] * 10, "nothing was kept"
    write_logprobs(folder, 1, math.log(2))
    paths.trained_logprobs(1, 1).write_bytes(b"not what a trainer writes")
    ratios = view_tokens(record, paths, 0, 0, 4, 6)["ratios"]
    assert ratios[0] is None and ratios[1:] == pytest.approx([2.0] * 5)
    record.episode.id = "another"
    assert view_tokens(record, paths, 0, 0, 0, 10)["ratios"] == [None] * 10, "another episode is another sample"
    assert ratio(-1.0, None) is None and ratio(math.nan, -1.0) is None and ratio(0.0, -1e9) is not None


def test_tokens_get_their_text_from_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1)
    assert find_tokenizer(RunPaths(folder)) is None
    (folder / "config" / "rl.toml").write_text('[model]\npath = "tiny"\n')
    write_rollouts(folder, 1, [rollout(1)])
    record = read_record(RolloutIndex(RunPaths(folder)), 1, 0)
    tokens = view_tokens(record, RunPaths(folder), 0, 0, 0, 3)
    assert tokens["texts"] == ["<|im_start|>", "user\n", "g"]


def test_restarts_are_found_in_logs_and_placed_on_steps(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=5)
    moment = BEGAN + 25
    (folder / "logs" / "trainer_001.log").write_text(json.dumps({"time": BEGAN, "level": "info"}) + "\n")
    (folder / "logs" / "trainer_002.log").write_text(json.dumps({"time": moment, "level": "info"}) + "\n")
    (folder / "logs" / "inference-0_002.log").write_text("serving\n")
    os.utime(folder / "logs" / "inference-0_002.log", (BEGAN + 35, BEGAN + 35))
    tables = Catalog(tmp_path).view("made").tables()
    marks = restarts(RunPaths(folder), tables)
    assert [(mark["process"], mark["attempt"], mark["step"]) for mark in marks] == [
        ("trainer", 2, 3),
        ("inference-0", 2, 4),
    ]
    assert len(attempts(folder / "logs")) == 3
    assert line_time(b"2026-01-31 12:00:00 INFO x") is not None and line_time(b"serving") is None


def test_processes_of_a_resumed_run_were_not_restarted(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1, attempts=[{}, {}])
    for name in ("trainer_001", "trainer_002", "inference-0_001", "inference-0_002", "inference-0_003"):
        (folder / "logs" / f"{name}.log").touch()
    assert Catalog(tmp_path).summaries()[0]["restarts"] == 1
    (folder / "run.json").write_text('{"attempts": 5}')
    assert Catalog(tmp_path).summaries()[0]["restarts"] == 3


def test_lanes_follow_each_other_without_overlap(tmp_path: Path) -> None:
    make_run(tmp_path, steps=5)
    every = lanes(Catalog(tmp_path).view("made").tables(), -math.inf, math.inf)
    drawn = {lane["name"]: lane["spans"] for lane in every}
    first = drawn["trainer"][:3]
    assert [span[2] for span in first] == ["wait for rollouts", "step", "publish"]
    assert [round(span[1] - span[0], 6) for span in first] == [3.0, 5.5, 0.5]
    for spans in drawn.values():
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(spans))


def test_environments_have_a_lane_with_shares_and_lost_workers(tmp_path: Path) -> None:
    make_run(tmp_path, steps=9)
    tables = Catalog(tmp_path).view("made").tables()
    lane = lanes(tables, -math.inf, math.inf)[-1]
    assert (lane["name"], lane["shares"]) == ("environments", True)
    assert [(span[2], round(span[1] - span[0], 6)) for span in lane["spans"][:2]] == [
        ("in engines", 6.75),
        ("in environments", 2.25),
    ]
    assert lane["lost"] == [(BEGAN + 66.0, 1.0, 7.0)]
    assert lanes(tables, BEGAN + 70, math.inf)[-1]["lost"] == []


def test_logs_are_read_in_pieces_and_searched(tmp_path: Path) -> None:
    log = tmp_path / "trainer_001.log"
    log.write_text("".join(f"line {number:06d}\n" for number in range(20_000)))
    end = read_piece(tmp_path, log.name)
    assert end["lines"][-1] == "line 019999" and end["start"] > 0
    before = read_piece(tmp_path, log.name, end=end["start"])
    assert int(before["lines"][-1][5:]) + 1 == int(end["lines"][0][5:])
    assert before["end"] - before["start"] <= PIECE
    with log.open("a") as file:
        file.write("new\nunfinished")
    grown = read_piece(tmp_path, log.name, since=end["end"])
    assert grown["lines"] == ["new"]
    assert search_log(tmp_path, log.name, "LINE 01234")["total"] == 10
    (tmp_path / "secret_001.log").symlink_to("/etc/passwd")
    for wrong in ("../trainer_001.log", "secret_001.log", "none"):
        with pytest.raises(KeyError):
            read_piece(tmp_path, wrong)


def test_settings_tell_flags_from_files_and_defaults(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=7)
    rows = {row["name"]: row for row in view_settings(RunPaths(folder))["files"][0]["settings"]}
    assert rows["max_steps"] == {"name": "max_steps", "value": 7, "origin": "flag"}
    assert rows["seed"]["origin"] == "default"
    assert rows["model.path"]["origin"] == rows["orchestrator.envs.0.id"]["origin"] == "file"


def test_a_summary_survives_missing_and_broken_files(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=3)
    line = summarize(RunPaths(folder))
    assert (line["step"], line["max_steps"], line["status"], line["reward"]) == (3, 3, "finished", 0.03)
    assert line["envs"] == ["reverse-text"] and line["step_seconds"] == 10.0
    (folder / "config" / "rl.toml").write_text("max_steps = [")
    (folder / "run.json").write_text("{")
    (folder / "metrics" / "trainer.jsonl").unlink()
    line = summarize(RunPaths(folder))
    assert line["status"] == "stopped" and line["command"] == ""


@pytest.mark.parametrize(
    ("record", "status"),
    [
        ({"state": "failed", "reason": "no GPU"}, "failed"),
        ({"state": "finished"}, "finished"),
        ({"state": "running", "attempts": [{"host": socket.gethostname(), "pid": 2**22 + 1}]}, "failed"),
        ({"state": "running", "attempts": "nonsense"}, "stopped"),
        ({}, "stopped"),
    ],
)
def test_a_run_whose_trainer_made_no_step_has_not_finished(tmp_path: Path, record: dict[str, Any], status: str) -> None:
    folder = make_run(tmp_path, steps=3, **record)
    (folder / "metrics" / "trainer.jsonl").write_text("")
    line = summarize(RunPaths(folder))
    assert line["status"] == status and line["tokens_per_second"] is None
    assert bool(line["reason"]) == (status == "failed")


def test_previews_are_of_what_the_policy_said_first(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    write_rollouts(folder, 1, [rollout(1, say=" first \n line" + "x" * 500), {"broken": 1}, rollout(1, say="")])
    index = RolloutIndex(RunPaths(folder))
    rows = Previews(index).add_to([{"step": 1, "line": line} for line in (0, 1, 2, 9)] + [{"step": 7, "line": 0}])
    assert [row["text"][:11] for row in rows] == ["first linex", "", "", "", ""]
    assert len(rows[0]["text"]) == 120


def test_evaluations_are_read_a_page_at_a_time(tmp_path: Path) -> None:
    lines = [json.dumps({"task": str(number), "rewards": [1.0]}) for number in range(5)]
    (tmp_path / "step_000010_held-out.jsonl").write_text("\n".join([*lines, "broken"]) + "\n")
    (tmp_path / "step_000020_held-out.jsonl").symlink_to("/etc/passwd")
    assert [one["step"] for one in rounds(tmp_path)] == [10]
    first = round_page(tmp_path, "step_000010_held-out.jsonl", 3, 2)
    assert [task["task"] for task in first["tasks"]] == ["3", "4"] and first["more"]
    assert not round_page(tmp_path, "step_000010_held-out.jsonl", 5, 2)["more"]
    for wrong in ("../run.json", "step_000020_held-out.jsonl"):
        with pytest.raises(KeyError):
            round_page(tmp_path, wrong, 0, 10)


def test_numbers_beyond_a_column_do_not_hide_a_run(tmp_path: Path) -> None:
    table = MetricTable(tmp_path / "m.jsonl")
    (tmp_path / "m.jsonl").write_text('{"step": 1e300, "a": 1}\n{"step": 3, "a": 2}\n{"step": -1e19, "a": 2}\n')
    table.refresh()
    assert table.steps().tolist() == [3]
    assert rollout_step("step_99999999999.jsonl.gz") is None and rollout_step("step_000007.jsonl.gz") == 7


def test_rollouts_with_strange_numbers_are_listed(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    record = rollout(1) | {"lag": -(10**6)}
    record["samples"] = [{"advantage": 0.0, "tokens": 2**40}]
    write_rollouts(folder, 1, [record])
    index = RolloutIndex(RunPaths(folder))
    index.refresh()
    index.wait()
    (row,) = page(index, Filter(), 0, 10)["rows"]
    assert row["lag"] < -30000 and row["tokens"] == 2**31 - 1
