"""Weights & Biases, with its own package and offline: one run with config, axes, tables, continued after a resume."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from run_folders import make_run, rollout, write_rollouts

from headway.config.commands import process_settings
from headway.config.rl import RlSettings
from headway.config.shared import WandbSettings
from headway.core.runs import RunPaths
from headway.monitor.wandb_run import WandbRun

OFFLINE = WandbSettings(project="p", mode="offline", tags=["t"])
BLOCK, HEADER, FIRST = 32768, 7, 7


def records(folder: Path) -> list[Any]:
    """All records of the one file that an offline run wrote: blocks of pieces, as LevelDB's log has them."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, place, found, parts = file.read_bytes(), FIRST, [], b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if len(data) < place + HEADER + size:
            break
        parts += data[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (1, 4):  # whole, or the last piece
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def whole(folder: Path) -> list[Any]:
    """All records, once the last one is there: a process of W&B writes them, some after the run has been closed."""
    deadline = time.monotonic() + 120
    while not (found := records(folder)) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, "the file of the run has no end"
        time.sleep(0.05)
    return found


def history(found: list[Any]) -> list[dict[str, Any]]:
    """The lines that were logged."""
    lines = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
             for record in found if record.WhichOneof("record_type") == "history"]  # fmt: skip
    return [{name: value for name, value in line.items() if not name.startswith("_")} for line in lines]


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPaths, list[Any]]:
    pytest.importorskip("wandb", reason="needs the extra `tracking`")
    folder = make_run(tmp_path_factory.mktemp("outputs"), "mine", steps=40)
    paths = RunPaths(folder)
    write_rollouts(folder, 2, [rollout(2, 1.0, say="the quick brown fox")])
    run = WandbRun(OFFLINE, paths)
    run.update("orchestrator", {"step": 0.0, "time": 1.0, "eval/held-out/avg": 0.25})
    run.update("trainer", {"step": 1.0, "time": 2.0, "loss": 0.5, "entropy": float("nan")})
    run.update("orchestrator", {"step": 2.0, "time": 3.0, "reward/mean": 0.75})
    run.update("trainer", {"step": 1.0, "time": 2.0, "loss": 0.6})  # a resumed run reads its lines again
    run.close()
    return paths, whole(paths.metrics)


def test_all_processes_are_one_run_with_their_own_steps(sent: tuple[RunPaths, list[Any]]) -> None:
    lines = [line for line in history(sent[1]) if "rollouts" not in " ".join(line)]
    assert lines == [
        {"eval/step": 0, "eval/held-out/avg": 0.25},
        {"trainer/step": 1, "trainer/loss": 0.5},
        {"orchestrator/step": 2, "orchestrator/reward/mean": 0.75},
    ]
    axes = {
        record.metric.glob_name or record.metric.name: record.metric.step_metric
        for record in sent[1]
        if record.WhichOneof("record_type") == "metric"
    }
    assert axes["eval/*"] == "eval/step" and axes["trainer/*"] == "trainer/step"


def test_the_run_has_its_settings_and_its_id_stays_in_the_folder(sent: tuple[RunPaths, list[Any]]) -> None:
    paths, found = sent
    (about,) = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert config["max_steps"] == 40 and config["orchestrator"]["envs"] == [{"id": "reverse-text"}]
    assert about.project == "p" and about.display_name == "mine" and list(about.tags) == ["t"]
    kept = json.loads((paths.metrics / "wandb.json").read_text())
    assert kept["id"] == about.run_id and kept["steps"] == {"eval": 0, "trainer": 1, "orchestrator": 2}


def test_rollouts_are_sent_as_a_table(sent: tuple[RunPaths, list[Any]]) -> None:
    (file,) = sent[0].metrics.glob("wandb/offline-run-*/files/media/table/rollouts_*.table.json")
    table = json.loads(file.read_text())
    assert table["columns"] == ["step", "environment", "task", "reward", "said", "reply"]
    assert table["data"] == [[2, "reverse-text", "gaqd", 1.0, "turn gaqd around", "the quick brown fox"]]


def test_the_processes_of_a_run_leave_it_to_its_supervisor() -> None:
    settings = RlSettings.model_validate({"tracking": {"wandb": {"project": "p"}}})
    parts = [part for part in process_settings(settings).values() if hasattr(part, "tracking")]
    assert len(parts) >= 2 and all(part.tracking.wandb is None for part in parts)
