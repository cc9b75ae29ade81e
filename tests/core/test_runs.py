"""Run folders: made once, claimed by one, found again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.base.errors import UsageError
from headway.config.loader import load_settings
from headway.config.rl import RlSettings
from headway.config.sft import SftSettings
from headway.config.shared import RunSettings
from headway.config.trainer import TrainSettings
from headway.monitor.dry_run import write_dry_run
from headway.monitor.runs import create_run, join_run, open_run


def test_a_new_run_has_a_record_and_folders(tmp_path: Path) -> None:
    paths = create_run(RunSettings(name="first", output_dir=tmp_path), "rl")
    assert paths.root == tmp_path / "first"
    assert json.loads(paths.record.read_text())["command"] == "rl"
    assert paths.logs.is_dir() and paths.metrics.is_dir()
    assert paths.control.stat().st_mode & 0o077 == 0
    assert open_run(paths.root) == paths


def test_generated_names_sort_and_never_collide(tmp_path: Path) -> None:
    runs = [create_run(RunSettings(output_dir=tmp_path), "rl").root.name for _ in range(3)]
    assert len(set(runs)) == 3
    assert all(name.split("-")[2] == "rl" for name in runs)


def test_a_taken_name_is_refused_with_the_way_out(tmp_path: Path) -> None:
    run = RunSettings(name="a", output_dir=tmp_path)
    paths = create_run(run, "rl")
    before = paths.record.read_text()
    with pytest.raises(
        UsageError, match=r"a already exists; continue that run with --resume, or choose another --run.name"
    ):
        create_run(run, "rl")
    assert paths.record.read_text() == before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="already exists"):
        create_run(RunSettings(name="a", output_dir=tmp_path), "rl")
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["thesis.tex"]


def test_a_dry_runs_settings_do_not_take_the_name(tmp_path: Path) -> None:
    run = RunSettings(name="a", output_dir=tmp_path)
    for _ in range(2):
        paths = create_run(run, "rl", dry_run=True)
        assert [entry.name for entry in paths.root.iterdir()] == ["config"]
    assert create_run(run, "rl").record.is_file()
    with pytest.raises(UsageError, match="already exists"):
        create_run(run, "rl", dry_run=True)


def test_of_processes_that_race_for_a_name_one_wins(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from headway.config.shared import RunSettings\n"
        "from headway.monitor.runs import create_run\n"
        "sys.stdin.readline()\n"
        "create_run(RunSettings(name='a', output_dir=pathlib.Path(sys.argv[1])), 'rl')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    errors = [racer.communicate()[1] for racer in racers]
    assert sorted(racer.returncode for racer in racers) == [0, 1, 1, 1]
    assert sum("UsageError" in error for error in errors) == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_opening_what_is_no_run_names_the_runs_there(tmp_path: Path) -> None:
    create_run(RunSettings(name="real", output_dir=tmp_path), "rl")
    with pytest.raises(UsageError, match="unreal is not a run folder; the latest runs there are real"):
        open_run(tmp_path / "unreal")


def test_processes_started_one_by_one_join_their_run(tmp_path: Path) -> None:
    run = RunSettings(name="a", output_dir=tmp_path)
    assert join_run(run, "orchestrate") == join_run(run, "train")


def test_a_dry_run_writes_the_settings_of_every_process_and_nothing_else(tmp_path: Path) -> None:
    run = RunSettings(name="a", output_dir=tmp_path)
    files = write_dry_run(RlSettings(run=run, seed=5), "rl")
    assert [file.name for file in files] == ["rl.toml", "trainer.toml", "orchestrator.toml", "inference.toml"]
    assert {path.name for path in tmp_path.rglob("*")} == {"a", "config", *(file.name for file in files)}
    again = load_settings(TrainSettings, ["@", str(files[1])]).settings
    assert (again.seed, again.run.name, again.run.output_dir) == (5, "a", tmp_path.resolve())
    (sft,) = write_dry_run(SftSettings(run=run), "sft")
    assert load_settings(SftSettings, ["@", str(sft)]).settings.run.name == "a"
    create_run(run, "rl")
    with pytest.raises(UsageError, match="already exists"):
        write_dry_run(RlSettings(run=run), "rl")


JOIN = """
import sys
from pathlib import Path
from headway.config.shared import RunSettings
from headway.monitor.runs import join_run
print("ready", flush=True)
sys.stdin.readline()
print(join_run(RunSettings(name="new", output_dir=Path(sys.argv[1])), "train").root)
"""


def test_ranks_that_start_together_get_one_run_which_the_first_creates(tmp_path: Path) -> None:
    def rank(number: int) -> "subprocess.Popen[str]":
        environment = {**os.environ, "RANK": str(number), "WORLD_SIZE": "4"}
        command = [sys.executable, "-c", JOIN, str(tmp_path)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)

    ranks = [rank(number) for number in range(4)]
    for process in ranks:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    # The last first: all others wait for the first rank, which alone may create the run.
    results = dict.fromkeys(ranks, "")
    for process in reversed(ranks):
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in ranks:
        results[process], errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert set(results.values()) == {f"{tmp_path / 'new'}\n"}
    assert json.loads((tmp_path / "new" / "run.json").read_text())["pid"] == ranks[0].pid


def test_ranks_without_a_name_for_their_run_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"2 ranks start together .* give it a --run.name"):
        join_run(RunSettings(output_dir=tmp_path), "train")
