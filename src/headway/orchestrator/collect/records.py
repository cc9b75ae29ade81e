"""Rollout records: the episodes of every trained batch, compressed, one JSON line each, for people and tools."""

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headway.core.episodes import Episode, Trace
from headway.core.errors import UsageError
from headway.core.files import write_atomic
from headway.core.runs import RunPaths
from headway.core.samples import Sample
from headway.orchestrator.collect.ready import ReadyGroup


class SampleRecord(msgspec.Struct, omit_defaults=True):
    """What was trained of one branch. `versions` are (oldest, newest)."""

    agent: str
    tokens: int
    sampled: int
    advantage: float
    versions: tuple[int, int]
    ce_tokens: int = 0
    ref_kl_tokens: int = 0


class RolloutRecord(msgspec.Struct, omit_defaults=True):
    """One episode of a trained batch, with its tokens, logprobs and versions as they were sampled."""

    step: int
    env: str
    group: str
    reward: float
    lag: int
    episode: Episode
    samples: list[SampleRecord] = msgspec.field(default_factory=list)


def record_batch(paths: RunPaths, step: int, groups: Sequence[ReadyGroup]) -> Path:
    """Write the records of batch `step`. They appear whole, and replace those of an earlier attempt."""
    path = rollout_file(paths, step)
    lines = b"".join(msgspec.json.encode(record) + b"\n" for group in groups for record in _records(step, group))
    write_atomic(path, gzip.compress(lines, compresslevel=3, mtime=0))
    return path


def read_records(path: Path) -> Iterator[RolloutRecord]:
    try:
        with gzip.open(path, "rb") as file:
            for line in file:
                yield msgspec.json.decode(line, type=RolloutRecord)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such record; `headway rollouts show RUN` lists the steps there are") from None
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise UsageError(f"{path}: not a rollout record ({error})") from None


def recorded_steps(paths: RunPaths) -> list[int]:
    return sorted(int(file.name[5:11]) for file in paths.rollouts.glob("step_*.jsonl.gz"))


def rollout_file(paths: RunPaths, step: int) -> Path:
    return paths.rollouts / f"step_{step:06d}.jsonl.gz"


def _records(step: int, ready: ReadyGroup) -> Iterator[RolloutRecord]:
    trained = {id(sample) for sample in ready.samples}
    lag = sum(ready.lags(step))
    for rollout in ready.group.rollouts:
        episode = msgspec.structs.replace(rollout.episode, traces=[_light(t) for t in rollout.episode.traces])
        samples = [_sample_record(sample) for sample in rollout.samples if id(sample) in trained]
        yield RolloutRecord(step, ready.group.env, ready.group.id, episode.reward, lag, episode, samples)


def _light(trace: Trace) -> Trace:
    """A trace without routed experts, which are large and of no use to a reader."""
    nodes = [msgspec.structs.replace(node, routed_experts=None) for node in trace.nodes]
    return msgspec.structs.replace(trace, nodes=nodes)


def _sample_record(sample: Sample) -> SampleRecord:
    versions = sample.versions[sample.versions >= 0]
    trained = sample.rl_weight != 0
    return SampleRecord(
        agent=sample.agent,
        tokens=len(sample),
        sampled=int(sample.sampled.sum()),
        advantage=float(sample.advantages[trained].mean()) if trained.any() else 0.0,
        versions=(int(versions.min()), int(versions.max())) if len(versions) else (-1, -1),
        ce_tokens=int(np.count_nonzero(sample.ce_weight)),
        ref_kl_tokens=int(np.count_nonzero(sample.ref_kl_weight)),
    )
