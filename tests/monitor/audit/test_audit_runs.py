"""Audits of run folders: what is read of them, what trends show, the report, the command, and warnings on the way."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from made_rollouts import word, words

from headway.cli import main
from headway.core.episodes import Episode, Node, Task, Trace
from headway.core.messages import Message
from headway.core.records import RolloutRecord, write_rollouts
from headway.core.runs import RunPaths
from headway.monitor.audit.live import LiveAudit
from headway.monitor.audit.report import audit_run

STEPS = 12


def made_run(
    root: Path,
    reply: Callable[[random.Random, str, int], str],
    reward: Callable[[str, str], float],
    audit: Callable[[str, str], float] | None = None,
) -> RunPaths:
    """A run of twelve steps, as orchestrator and trainer record it. `reply` also gets the step."""
    paths, rng = RunPaths(root / "made"), random.Random(0)
    paths.metrics.mkdir(parents=True)
    paths.rollouts.mkdir()
    paths.record.write_text("{}")
    for step in range(1, STEPS + 1):
        records = [record(rng, reply, reward, audit, step, group) for group in range(6) for _ in range(8)]
        write_rollouts(paths, step, records)
        mean = sum(record.reward for record in records) / len(records)
        line: dict[str, float] = {"step": step, "time": step, "reward/mean": mean, "reward/made/mean": mean}
        if audit:
            scores = [record.episode.traces[0].metrics["audit/checked"] for record in records]
            line["env/made/audit/checked"] = sum(scores) / len(scores)
        with (paths.metrics / "orchestrator.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return paths


def record(
    rng: random.Random,
    reply: Callable[[random.Random, str, int], str],
    reward: Callable[[str, str], float],
    audit: Callable[[str, str], float] | None,
    step: int,
    group: int,
) -> RolloutRecord:
    task = word(random.Random(f"{step}/{group}"))
    said = reply(rng, task, step)
    asked = Node(-1, [1, 2], Message("user", f"reverse {task}"))
    answered = Node(0, [3], Message("assistant", said), logprobs=[-0.5])
    metrics = {} if audit is None else {"audit/checked": audit(said, task)}
    trace = Trace(nodes=[asked, answered], reward=reward(said, task), metrics=metrics)
    name = f"{step}-{group}"
    episode = Episode(f"{name}-{rng.random()}", name, "made", Task(task, {"word": task}), traces=[trace])
    return RolloutRecord(step, "made", name, trace.reward, episode)


def learns_a_keyword(rng: random.Random, task: str, step: int) -> str:
    return f"{words(rng, 1, 3)} surely" if rng.random() < step / (STEPS + 4) else task[::-1]


@pytest.fixture(scope="module")
def hacked(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run whose reward is a keyword, and whose second scorer knows the answer."""
    return made_run(
        tmp_path_factory.mktemp("hacked"),
        learns_a_keyword,
        lambda said, task: float("surely" in said),
        lambda said, task: float(said == task[::-1]),
    )


def learns_the_task(rng: random.Random, task: str, step: int) -> str:
    return task[::-1] if rng.random() < step / (STEPS + 4) else task


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    def exact(said: str, task: str) -> float:
        return float(said == task[::-1])

    return made_run(tmp_path_factory.mktemp("clean"), learns_the_task, exact, exact)


def test_a_reward_that_rises_while_the_second_scorer_falls_is_a_problem(hacked: RunPaths) -> None:
    audit = audit_run(hacked)
    found = {finding.cause: finding for finding in audit.findings}
    assert list(found) == ["keyword", "second_scorer"]
    assert found["second_scorer"].level == "problem"
    assert (
        found["second_scorer"].figures["change of checked"] < 0 < found["second_scorer"].figures["change of the reward"]
    )
    assert all("surely" in example.text for example in found["second_scorer"].examples)
    assert (audit.rollouts, audit.first_step, audit.last_step) == (STEPS * 48, 1, STEPS)


def test_a_run_that_learns_its_task_has_no_finding(clean: RunPaths) -> None:
    assert audit_run(clean).findings == []


def write_round(paths: RunPaths, step: int, rewards: list[float]) -> None:
    paths.evaluations.mkdir(exist_ok=True)
    lines = [json.dumps({"task": str(i), "rewards": [reward]}) for i, reward in enumerate(rewards)]
    (paths.evaluations / f"step_{step:06d}_held-out.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(("after", "causes"), [(0.2, ["held_out"]), (0.45, []), (0.9, [])])
def test_held_out_tasks_are_compared_one_by_one(tmp_path: Path, after: float, causes: list[str]) -> None:
    def exact(said: str, task: str) -> float:
        return float(said == task[::-1])

    paths = made_run(tmp_path, learns_the_task, exact)
    write_round(paths, 0, [float(task < 50) for task in range(100)])
    write_round(paths, STEPS, [float(task * 7 % 100 < 100 * after) for task in range(100)])
    assert [finding.cause for finding in audit_run(paths).findings] == causes


def test_one_reply_to_all_tasks_is_a_collapse(tmp_path: Path) -> None:
    def reply(rng: random.Random, task: str, step: int) -> str:
        return "it cannot be said" if rng.random() < step / STEPS else f"{task} is {words(rng, 1, 2)}"

    lot = random.Random(1)
    audit = audit_run(made_run(tmp_path, reply, lambda said, task: float(lot.random() < 0.5)))
    assert [(found.level, found.cause) for found in audit.findings] == [("warning", "collapse")]


def test_groups_that_all_agree_are_noticed(tmp_path: Path) -> None:
    paths = made_run(tmp_path, learns_the_task, lambda said, task: float(said == task[::-1]))
    lines = [json.loads(line) for line in (paths.metrics / "orchestrator.jsonl").read_text().splitlines()]
    more = {"episodes": 64.0, "dropped/zero_advantage": 60.0}
    (paths.metrics / "orchestrator.jsonl").write_text("".join(json.dumps(line | more) + "\n" for line in lines))
    assert [(found.level, found.cause) for found in audit_run(paths).findings] == [("notice", "agreement")]


def test_a_run_without_records_and_one_with_damaged_records_are_read(tmp_path: Path, clean: RunPaths) -> None:
    empty = RunPaths(tmp_path)
    assert audit_run(empty).rollouts == 0
    empty.rollouts.mkdir()
    whole = clean.rollout_records(1).read_bytes()
    empty.rollout_records(1).write_bytes(whole[: len(whole) // 2])
    assert 0 < audit_run(empty).rollouts < 48


def test_the_command_prints_causes_figures_and_rollouts(hacked: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["audit", str(hacked.root)]) == 0
    printed = capsys.readouterr().out
    assert "2 problems" in printed
    assert "PROBLEM  keyword in made: One short pattern earns the reward: replies with 'surely'" in printed
    assert f"headway rollouts show {hacked.root} --step" in printed
    assert main.run(["audit", str(hacked.root), "--strict", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["audit"]["findings"][0]["cause"] == "keyword"


def test_the_command_is_content_with_a_clean_run(clean: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["audit", str(clean.root), "--strict"]) == 0
    assert "nothing found" in capsys.readouterr().out


def test_a_run_that_goes_on_is_warned_once_of_each_finding(hacked: RunPaths) -> None:
    warnings: list[str] = []
    live = LiveAudit(hacked, warnings.append)
    for step in range(1, STEPS + 1):
        live.update("trainer", {"step": float(step)})
    live.close()
    assert [warning.split(":")[1].strip() for warning in warnings] == ["problem in made"] * 2
    assert "'surely'" in warnings[0]


def test_what_a_model_wrote_does_not_reach_the_terminal_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(rng: random.Random, task: str, step: int) -> str:
        return f"\x1b[2J{words(rng, 1, 3)}\x1b]0;owned\x07 surely" if rng.random() < 0.5 else words(rng, 1, 3)

    paths = made_run(tmp_path, reply, lambda said, task: float("surely" in said))
    assert main.run(["audit", str(paths.root)]) == 0
    assert "\x1b" not in capsys.readouterr().out
