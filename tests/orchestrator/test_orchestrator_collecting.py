"""From settled groups to batches: filters, gates, the ready queue, health, what is remembered, what is recorded."""

import asyncio
import gzip
import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.algorithms.base import Algorithm, Group, Rollout
from headway.algorithms.rae import Rae
from headway.algorithms.registry import make_algorithm
from headway.base.errors import HeadwayError, UsageError
from headway.cli import rollouts as rollouts_command
from headway.config.algorithms import Grpo
from headway.config.orchestrator import CertainRunFilter, FilterSettings, RareTokenFilter
from headway.config.shared import FilesystemRollouts, RolloutTransport, ZmqRollouts
from headway.core.episodes import Episode, EpisodeError, ErrorKind, Node, Task, Trace
from headway.core.messages import Message, Tool
from headway.core.packing import Cost, make_batch
from headway.core.protocol import SamplingParams
from headway.core.records import read_rollouts, write_rollouts
from headway.core.runs import RunPaths
from headway.core.samples import Sample
from headway.envs.samples import episode_samples
from headway.orchestrator.collect.collector import LEAST_SHARE, Collector, checked_samples
from headway.orchestrator.collect.filters import has_certain_run, judge, load_filters, load_gates, repeated_share
from headway.orchestrator.groups.curriculum import InOrder
from headway.orchestrator.groups.open_group import OpenGroup
from headway.orchestrator.groups.ready import ReadyGroup, ReadyQueue
from headway.orchestrator.groups.sources import Source
from headway.orchestrator.health import ENGINE_PATIENCE_SECONDS, WINDOW, Health
from headway.orchestrator.outbox import BatchOutbox, rollout_records
from headway.orchestrator.scores import summarize
from headway.orchestrator.state import OrchestratorState
from headway.orchestrator.tally import StepTally, batch_values
from headway.transport.rollouts import make_receiver, make_sender

GRPO = make_algorithm(Grpo())


def make_episode(
    reward: float, name: str = "g.0", *, tokens: list[int] | None = None, version: int = 3, truncated: bool = False
) -> Episode:
    reply = tokens or [4, 5, 6]
    nodes = [
        Node(-1, [1, 2], Message("user", "question")),
        Node(0, reply, Message("assistant", f"answer \x1b[31m{name}"), [-1.0] * len(reply), [(version, len(reply))]),
    ]
    return Episode(name, "g", "env", Task("task"), traces=[Trace(nodes=nodes, reward=reward, truncated=truncated)])


def scored(*episodes: Episode) -> Group:
    group = Group("g", "env", Task("task"), [Rollout(e, episode_samples(e)) for e in episodes])
    GRPO.score(group)
    return group


def ready(*episodes: Episode, arrived: int = 3) -> ReadyGroup:
    group = scored(*episodes)
    samples = [sample for _, sample in group.samples()]
    return ReadyGroup(group, samples, len(episodes), arrived)


def test_a_group_of_equal_rewards_is_dropped_unless_wanted() -> None:
    flat = scored(make_episode(0.1), make_episode(0.1), make_episode(0.1))
    assert judge(flat, FilterSettings(), 64).cause == "zero_advantage"
    kept = judge(flat, FilterSettings(zero_advantage=False), 64)
    assert kept.cause is None and kept.episodes == 3


def test_samples_are_dropped_by_cause_and_the_rest_goes_on() -> None:
    loop = [9, 8] * 20
    group = scored(
        make_episode(1.0),
        make_episode(0.0, truncated=True),
        make_episode(0.0, tokens=loop),
        make_episode(0.0, tokens=list(range(60))),
    )
    group.rollouts[0].samples[0].logprobs[:] = -0.5
    settings = FilterSettings(truncated=True, repetition=0.5, gibberish=-5.0)
    verdict = judge(group, settings, seq_len=50)
    assert verdict.cause is None and verdict.episodes == 1 and len(verdict.samples) == 1
    assert verdict.dropped == {"truncated": 1, "repetition": 1, "too_long": 1}
    group.rollouts[0].samples[0].logprobs[:] = -9.0
    assert judge(group, settings, seq_len=50).cause is not None


def test_repetition_is_the_share_of_eight_grams_seen_before() -> None:
    assert repeated_share(np.arange(20, dtype=np.int32)) == 0.0
    assert repeated_share(np.zeros(17, dtype=np.int32)) == pytest.approx(0.9)  # ten windows, all alike
    assert repeated_share(np.zeros(8, dtype=np.int32)) == 0.0


def test_rare_tokens_and_runs_of_certain_tokens_are_found_among_what_was_sampled() -> None:
    group = scored(make_episode(1.0), make_episode(0.0, tokens=[7, 99, 7]), make_episode(0.0, tokens=[5] * 6))
    rare, loop = (group.rollouts[i].samples[0] for i in (1, 2))
    rare.logprobs[3] = -20.0
    loop.logprobs[loop.sampled] = [-0.001, -3.0, -0.001, -0.001, -0.001, -3.0]
    settings = FilterSettings(
        rare_tokens=RareTokenFilter(token_id=50, logprob=-14.0), certain_run=CertainRunFilter(length=3)
    )
    assert judge(group, settings, 64).dropped == {"rare_tokens": 1, "certain_run": 1}
    rare.logprobs[3], loop.logprobs[4] = -13.0, -3.0
    assert judge(group, settings, 64).dropped == {}
    rare.logprobs[3], rare.sampled[3] = -20.0, False
    assert judge(group, settings, 64).dropped == {}


@given(certain=st.lists(st.booleans(), max_size=20), length=st.integers(1, 8))
def test_a_certain_run_is_as_many_in_a_row(certain: list[bool], length: int) -> None:
    sample = Sample.blank(len(certain))
    sample.sampled[:] = True
    sample.logprobs[:] = np.where(certain, -0.001, -1.0)
    runs = [len(list(run)) for value, run in itertools.groupby(certain) if value]
    assert has_certain_run(sample, CertainRunFilter(length=length)) == (max(runs, default=0) >= length)


def pays(rollout: Rollout) -> bool:
    return rollout.episode.reward > 0.5


def test_filters_of_ones_own_drop_single_rollouts() -> None:
    own = load_filters([f"{__file__}:pays"])
    verdict = judge(scored(make_episode(1.0), make_episode(0.0)), FilterSettings(), 64, own=own)
    assert verdict.cause is None and verdict.episodes == 1 and verdict.dropped == {"pays": 1}
    assert judge(scored(make_episode(0.4), make_episode(0.0)), FilterSettings(), 64, own=own).cause == "pays"


def refuse_low(group: Group) -> bool:
    return max(rollout.episode.reward for rollout in group.rollouts) > 0.5


def test_gates_refuse_groups() -> None:
    gates = load_gates([f"{__name__}:refuse_low"])
    assert judge(scored(make_episode(1.0), make_episode(0.0)), FilterSettings(), 64, gates).cause is None
    assert judge(scored(make_episode(0.4), make_episode(0.0)), FilterSettings(), 64, gates).cause == "gate"
    with pytest.raises(UsageError):
        load_gates(["nowhere:nothing"])


def test_the_queue_gives_the_oldest_first_and_sweeps_what_is_too_old() -> None:
    queue = ReadyQueue()
    groups = [ready(make_episode(1.0, version=v), make_episode(0.0, version=v)) for v in (5, 2, 4)]
    for group in groups:
        queue.add(group)
    assert queue.take(7) is None and queue.episodes == 6
    assert queue.sweep(6, max_lag=2) == [groups[1]]
    assert queue.take(3) == [groups[2], groups[0]] and queue.episodes == 0


def test_lag_is_split_into_in_flight_and_in_queue() -> None:
    group = ready(make_episode(1.0, version=2), make_episode(0.0, version=3), arrived=4)
    assert group.lags(8) == (2, 3)
    assert batch_values([group], 8)["lag/mean"] == 5 and batch_values([group], 8)["lag/in_queue_max"] == 3


def make_health(clock: Callable[[], float] = lambda: 0.0) -> Health:
    return Health(max_error_share=0.5, max_empty_batches=3, batch_size=4, clock=clock)


def failed(kind: ErrorKind, message: str = "boom") -> Episode:
    return Episode("e", "g", "env", Task("t"), error=EpisodeError(kind, message))


def test_an_environment_that_always_fails_stops_the_run_with_its_reasons() -> None:
    health = make_health()
    for _ in range(WINDOW // 2):
        health.saw_episode(make_episode(1.0))
    for _ in range(WINDOW // 2):
        health.saw_episode(failed("environment", "ZeroDivisionError"))
    health.check()
    health.saw_episode(failed("reward", "no such key"))
    with pytest.raises(HeadwayError, match=r"(?s)50% of the last 256 episodes failed.*128 x environment: Zero"):
        health.check()


def test_engines_that_are_away_for_a_while_do_not_stop_the_run() -> None:
    now = [0.0]
    health = make_health(lambda: now[0])
    for _ in range(2 * WINDOW):
        health.saw_episode(failed("engine"))
        health.saw_episode(failed("cancelled"))
    now[0] = ENGINE_PATIENCE_SECONDS - 1
    health.saw_episode(failed("engine"))
    health.check()
    now[0] = ENGINE_PATIENCE_SECONDS + 1
    health.saw_episode(failed("engine", "connection refused"))
    with pytest.raises(HeadwayError, match="connection refused"):
        health.check()


def test_rewards_that_never_differ_stop_the_run() -> None:
    health = make_health()
    health.saw_group(8, useful=False)
    health.saw_group(2, useful=True)
    health.saw_group(11, useful=False)
    health.check()
    health.saw_group(1, useful=False)
    with pytest.raises(HeadwayError, match="no group of the last 12 episodes"):
        health.check()


class Unreachable(Algorithm):
    async def query_references(self, group: Group) -> None:
        raise HeadwayError("the teacher is gone")


class Broken(Algorithm):
    def score(self, group: Group) -> None:
        raise RuntimeError("a bug")


def collect(algorithm: Algorithm, *episodes: Episode) -> tuple[Collector, ReadyQueue, Health]:
    async def main() -> tuple[Collector, ReadyQueue, Health]:
        queue, health = ReadyQueue(), make_health()
        collector = Collector(
            queue,
            filters=FilterSettings(),
            gates=[],
            seq_len=64,
            health=health,
            tally=StepTally(),
            changed=asyncio.Event(),
        )
        source = Source("env", None, [Task("t")], InOrder(1), algorithm, 4, SamplingParams(), 1.0)  # type: ignore[arg-type]
        group = OpenGroup("g", "env", Task("task"), 0, 3, size=4)
        group.waiting.clear()
        for episode in episodes:
            (group.failed if episode.error else group.finished).append(episode)
        group.settled_version = 5
        collector.add(group, source)
        for _ in range(3):  # its task, and what is called when that has ended
            await asyncio.sleep(0)
        return collector, queue, health

    return asyncio.run(main())


def test_a_group_goes_on_with_fewer_but_never_alone() -> None:
    collector, queue, _ = collect(GRPO, make_episode(1.0), make_episode(0.0), failed("worker"), failed("worker"))
    assert queue.episodes == 2 and not collector.tally.dropped and collector.useful_share == pytest.approx(0.975)
    collector, queue, _ = collect(GRPO, make_episode(1.0), failed("worker"), failed("worker"), failed("tool"))
    assert queue.episodes == 0 and collector.tally.dropped == {"failed": 4}
    assert LEAST_SHARE < collector.useful_share < 1


def test_episodes_with_numbers_that_make_no_sense_are_left_out() -> None:
    wild = make_episode(float("nan"))
    infinite = make_episode(0.0)
    infinite.traces[0].nodes[1].logprobs = [-1.0, float("-inf"), -1.0]
    uncovered = make_episode(0.0)
    uncovered.traces[0].nodes[1].versions = [(3, 1)]
    collector, queue, health = collect(GRPO, make_episode(1.0), make_episode(0.0), wild, infinite)
    assert queue.episodes == 2 and collector.tally.dropped == {"invalid": 2}
    collector, queue, health = collect(GRPO, make_episode(1.0), uncovered)
    assert queue.episodes == 0 and collector.tally.dropped == {"invalid": 1, "failed": 4}
    health.check()


def test_a_teacher_that_is_gone_costs_the_group_and_a_bug_stops_the_run() -> None:
    collector, queue, health = collect(Unreachable(), make_episode(1.0), make_episode(0.0))
    assert queue.episodes == 0 and collector.tally.dropped == {"reference": 2}
    health.check()
    _, _, health = collect(Broken(), make_episode(1.0), make_episode(0.0))
    with pytest.raises(RuntimeError, match="a bug"):
        health.check()


def test_the_numbers_of_a_step() -> None:
    tally = StepTally()
    group = scored(make_episode(1.0), make_episode(0.0, truncated=True))
    tally.saw_group(group)
    for rollout in group.rollouts:
        tally.saw_episode(rollout.episode)
    tally.saw_episode(failed("tool"))
    tally.dropped["stale"] += 1
    values = tally.values(seconds=2.0)
    assert values["reward/mean"] == values["reward/env/mean"] == values["pass_rate"] == values["truncated"] == 0.5
    assert values["tokens_per_second"] == 3.0 and values["length/mean"] == 3.0 and values["turns/mean"] == 1.0
    assert values["errors/tool"] == values["dropped/stale"] == 1.0 and values["errors/share"] == pytest.approx(1 / 3)


def test_an_evaluation_counts_failures_as_zero() -> None:
    summary = summarize([[make_episode(1.0), failed("tool")], [make_episode(0.5), make_episode(0.5)]])
    assert summary["avg"] == 0.5 and summary["errors"] == 0.25
    assert summary["pass@1"] == 0.25 and summary["pass@2"] == 0.5


def test_records_tell_everything_about_a_trained_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    paths = RunPaths(tmp_path)
    other = make_episode(0.0, "g.1")
    group = ready(make_episode(1.0, "g.0", version=2), other)
    other.traces[0].offer([Tool("weather", parameters={"properties": {"city": {}, "day": {}}})])
    write_rollouts(paths, 4, rollout_records(4, [group]))
    one, two = read_rollouts(paths, 4)
    assert one.reward == 1.0 and one.samples[0].advantage == 0.5 and one.samples[0].versions == (2, 2) and one.lag == 1
    assert two.episode.traces[0].nodes[1].logprobs == [-1.0] * 3
    assert len(gzip.decompress(paths.rollout_records(4).read_bytes()).splitlines()) == 2

    paths.record.write_text("{}")
    assert rollouts_command.run(["show", str(tmp_path), "--max-reward", "0.5", "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert "g.1" in shown and "g.0" not in shown and "advantage -0.500" in shown and "v3 x 3" in shown
    assert "tools  weather(city, day)" in shown
    assert "\x1b[31m" not in shown, "what a model wrote must not steer the terminal"
    assert rollouts_command.run(["show", str(tmp_path), "--json", "--min-reward=1"]) == 0
    assert json.loads(capsys.readouterr().out)["episode"]["id"] == "g.0"
    for wrong in (["--step", "9"], ["--step", "x"], ["--nope"], ["--env"]):
        with pytest.raises(UsageError):
            rollouts_command.run(["show", str(tmp_path), *wrong])


def test_the_outbox_packs_records_and_prunes_what_checkpoints_cover(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    sender = make_sender(FilesystemRollouts(), paths)
    outbox = BatchOutbox(sender, paths, seq_len=16, ranks=2, cost=Cost(), record=True)
    for step in range(1, 7):
        group = ready(make_episode(1.0), make_episode(0.0))
        asyncio.run(outbox.send(step, [group], {"reward/mean": 0.5}, b"%d" % step))
        if step % 2 == 0:
            finish_checkpoint(paths, step)
    assert outbox.last_step() == 6 and next(outbox.load_states()) == (6, b"6")
    assert paths.complete_checkpoints() == [2, 4, 6]
    assert sorted(p.name for p in paths.batches.iterdir()) == ["step_000002", *(f"step_00000{s}" for s in (3, 4, 5, 6))]
    part = make_receiver(FilesystemRollouts(), paths, 1, 2).receive(6, timeout=0)
    assert part is not None and part.metrics == {"reward/mean": 0.5} and part.counts.rl == 6
    assert sorted(p.name for p in paths.rollouts.iterdir())[-1] == "step_000006.jsonl.gz"


def finish_checkpoint(paths: RunPaths, step: int) -> None:
    paths.checkpoint(step).mkdir(parents=True)
    (paths.checkpoint(step) / "COMPLETE").touch()


@pytest.mark.parametrize("transport", [FilesystemRollouts(), ZmqRollouts()], ids=["filesystem", "zmq"])
def test_a_trainer_can_fall_back_on_the_checkpoint_before_the_newest(
    tmp_path: Path, transport: RolloutTransport
) -> None:
    """Every batch is sent once: what the trainer asks for again was kept, or is refused at once."""
    paths = RunPaths(tmp_path)
    sender = make_sender(transport, paths)
    receiver = make_receiver(transport, paths, 0, 1)
    outbox = BatchOutbox(sender, paths, seq_len=16, ranks=1, cost=Cost(), record=False)
    for step in range(1, 10):
        asyncio.run(outbox.send(step, [ready(make_episode(1.0), make_episode(0.0))], {}, b"{}"))
        if step in (3, 6, 8):
            finish_checkpoint(paths, step)
    shutil.rmtree(paths.checkpoint(8))  # as the error about a damaged checkpoint advises
    assert all(receiver.receive(step, timeout=120) is not None for step in (7, 8, 9))
    shutil.rmtree(paths.checkpoint(6))
    with pytest.raises(HeadwayError, match=r"step_000004 was removed, though batch 9 exists.*--resume"):
        receiver.receive(4, timeout=None)
    receiver.close()
    sender.close()


def test_batches_are_also_pruned_for_a_trainer_that_keeps_one_checkpoint(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    outbox = BatchOutbox(
        make_sender(FilesystemRollouts(), paths), paths, seq_len=16, ranks=1, cost=Cost(), record=False
    )
    for step in range(1, 10):
        asyncio.run(outbox.send(step, [ready(make_episode(1.0), make_episode(0.0))], {}, b"{}"))
        if step % 2 == 0:
            finish_checkpoint(paths, step)
            shutil.rmtree(paths.checkpoint(step - 2), ignore_errors=True)
    assert paths.spooled_batches() == [7, 8, 9]


def test_a_run_that_began_from_anothers_checkpoint_counts_on_from_there(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    finish_checkpoint(paths, 7)
    outbox = BatchOutbox(make_sender(FilesystemRollouts(), paths), paths, seq_len=8, ranks=1, cost=Cost(), record=False)
    assert outbox.last_step() == 7 and list(outbox.load_states()) == []


def test_frozen_samplers_data_has_no_age() -> None:
    group = scored(make_episode(1.0), make_episode(0.0))
    for _, sample in group.samples():
        sample.versions[:] = -1
    item = ReadyGroup(group, [sample for _, sample in group.samples()], 2, 5)
    queue = ReadyQueue()
    queue.add(item)
    assert queue.sweep(1000, max_lag=0) == [] and item.lags(1000) == (0, 0)
    assert make_batch(1, item.samples, seq_len=8, ranks=1, cost=Cost()).counts.rl == 6


def test_moving_averages_survive_a_restart() -> None:
    one, other = Rae(0.95), Rae(0.95)
    one.advantages(scored(make_episode(1.0)))
    other.load(json.loads(json.dumps(one.save())))
    assert other.averages == one.averages


def test_a_damaged_state_gives_way_to_the_one_before(caplog: pytest.LogCaptureFixture) -> None:
    whole = OrchestratorState(step=4, evaluated=3).encode()
    assert OrchestratorState.newest([(5, whole[:9]), (4, whole)]) == OrchestratorState(step=4, evaluated=3)
    assert "after batch 5 is damaged" in caplog.text
    assert OrchestratorState.newest([(5, b"{"), (4, b"")]) is None


@pytest.mark.parametrize("reward", [1e308, -1e7, math.inf, math.nan])
def test_rewards_that_no_advantage_can_hold_are_invalid(reward: float) -> None:
    with pytest.raises(ValueError, match="its reward is"):
        checked_samples(make_episode(reward))


def test_starts_of_sandboxes_are_counted_over_all_environments() -> None:
    tally = StepTally()
    assert "sandboxes/starts_per_second" not in tally.values(2.0)
    tally.env_metrics["code/sandbox_starts"] += [2.0, 3.0]
    tally.env_metrics["terminal/sandbox_starts"] += [1.0]
    assert tally.values(2.0)["sandboxes/starts_per_second"] == 3.0
