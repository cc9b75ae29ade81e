"""Task sets: made by `headway env filter` from a model's pass rates, and taken by a run."""

import json
from pathlib import Path

import pytest
from engine_script import ScriptedEngine

from headway.base.errors import UsageError
from headway.cli.main import run as headway
from headway.core.episodes import Episode, EpisodeError, Task, Trace
from headway.models.tiny_tokenizer import save_tiny_tokenizer
from headway.orchestrator.task_sets import TaskRate, select_tasks, task_rate, write_task_set

TASKS = [Task(name) for name in ("a", "b", "c")]


def episode(reward: float, error: EpisodeError | None = None) -> Episode:
    return Episode("e", "g", "env", Task("a"), traces=[Trace(reward=reward)], error=error)


def test_a_rate_is_the_share_that_solved_the_task_or_the_mean_reward() -> None:
    failed = episode(0.0, EpisodeError("engine", "gone"))
    episodes = [episode(1.0), episode(0.5), episode(0.0), failed]
    assert task_rate(TASKS[0], episodes, by_reward=False) == TaskRate("a", 1 / 3, [1.0, 0.5, 0.0])
    assert task_rate(TASKS[0], episodes, by_reward=True) == TaskRate("a", 0.5, [1.0, 0.5, 0.0])
    assert task_rate(TASKS[0], [failed], by_reward=False) is None


def test_a_set_names_tasks_in_its_order(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    write_task_set([TaskRate("c", 0.5), TaskRate("a", 0.2)], file)
    assert select_tasks(TASKS, file) == [TASKS[2], TASKS[0]] and select_tasks(TASKS, None) == TASKS
    with pytest.raises(UsageError, match="'c' and 0 others are not among the environment's 2 tasks"):
        select_tasks(TASKS[:2], file)
    for content in ("", "nonsense\n"):
        file.write_text(content)
        with pytest.raises(UsageError, match="task_set"):
            select_tasks(TASKS, file)


def test_the_command_keeps_what_a_served_model_sometimes_solves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_tokenizer(tmp_path)
    file = tmp_path / "kept.jsonl"
    with ScriptedEngine() as engine:
        asked = ["--url", engine.url, "--model", str(tmp_path), "--tasks", "6", "--max-tokens", "6", "-o", str(file)]
        command = ["env", "filter", "reverse-text", *asked, "--args.num_tasks", "6", "--samples", "3"]
        assert headway([*command, "--by-reward", "--min-rate", "0"]) == 0
        assert (
            "6 of 6 tasks kept: 0 are too hard (below 0), 0 too easy (above 0.9), 0 failed" in capsys.readouterr().err
        )
        kept = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(kept) == 6 and all(len(line["rewards"]) == 3 for line in kept)
        assert kept[0]["rate"] == pytest.approx(sum(kept[0]["rewards"]) / 3)
        assert headway([*command, "--min-rate", "0.99", "--max-rate", "1"]) == 1  # no word is ever right
        assert "no task is left" in capsys.readouterr().err
    assert headway(["env", "filter", "reverse-text", *asked[:-2]]) == 2
    assert "-o" in capsys.readouterr().err
