"""Records that a run keeps for people and tools: the episodes of every trained batch, compressed, one JSON line each,
and the trainer's own logprobs of some of their tokens."""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from headway.base.errors import UsageError
from headway.base.files import write_atomic
from headway.core.episodes import Episode, Trace
from headway.core.runs import RunPaths
from headway.core.samples import BranchKey, Sample
from headway.core.streams import Floats
from headway.core.wire import decode, encode

_ROLLOUTS = re.compile(r"step_(\d{6,})\.jsonl\.gz")
_LARGEST_LOGPROBS = 64 << 20
"""Bytes. Larger files were not written by a trainer."""
_PART_BYTES, _MOST_THREADS = 1 << 20, 8
"""Records are compressed in parts of so many bytes, by so many threads at most."""


def short_group(group: str) -> str:
    """Shorten a group's id for people: its end. Ids of one run begin alike."""
    return group[-8:]


class SampleRecord(msgspec.Struct):
    """The trained part of one branch, that of node `leaf` of trace `trace`. `versions` are (oldest, newest)."""

    agent: str = "policy"
    tokens: int = 0
    sampled: int = 0
    advantage: float = 0.0
    versions: tuple[int, int] = (-1, -1)
    ce_tokens: int = 0
    ref_kl_tokens: int = 0
    trace: int = 0
    leaf: int = -1

    @classmethod
    def of(cls, sample: Sample) -> "SampleRecord":
        versions = sample.versions[sample.versions >= 0]
        trained = sample.rl_weight != 0
        return cls(
            agent=sample.agent,
            tokens=len(sample),
            sampled=int(sample.sampled.sum()),
            advantage=float(sample.advantages[trained].mean()) if trained.any() else 0.0,
            versions=(int(versions.min()), int(versions.max())) if len(versions) else (-1, -1),
            ce_tokens=int(np.count_nonzero(sample.ce_weight)),
            ref_kl_tokens=int(np.count_nonzero(sample.ref_kl_weight)),
            trace=sample.trace,
            leaf=sample.key.leaf,
        )


class RolloutRecord(msgspec.Struct):
    """One episode, trained or dropped, with its tokens, logprobs and versions as they were sampled."""

    step: int
    env: str
    group: str
    reward: float
    episode: Episode
    lag: int = 0
    samples: list[SampleRecord] = msgspec.field(default_factory=list)
    cause: str = ""
    """Why it was not trained, such as `failed` or `zero_advantage`; empty for episodes of the batch."""

    def find_sample(self, trace: int, leaf: int) -> SampleRecord | None:
        """Return what was trained of a branch; None for nothing."""
        return next((sample for sample in self.samples if (sample.trace, sample.leaf) == (trace, leaf)), None)


def without_experts(episode: Episode) -> Episode:
    """Copy an episode without routed experts, which are large and of no use to a reader, and the bytes of images, which
    have files of their own."""

    def copy(trace: Trace) -> Trace:
        nodes = [msgspec.structs.replace(node, routed_experts=None) for node in trace.nodes]
        return msgspec.structs.replace(trace, nodes=nodes)

    return msgspec.structs.replace(episode, traces=[copy(trace) for trace in episode.traces], images={})


def write_rollouts(paths: RunPaths, step: int, records: Iterable[RolloutRecord]) -> None:
    """Write the records of batch `step`. They appear whole, and replace those of an earlier attempt."""
    _write_records(paths.rollout_records(step), records)


def write_untrained(paths: RunPaths, step: int, records: Iterable[RolloutRecord]) -> None:
    """Write the sample of episodes that failed or were dropped while batch `step` was collected."""
    _write_records(paths.untrained_records(step), records)


def _write_records(path: Path, records: Iterable[RolloutRecord]) -> None:
    # A batch waits for its record. Parts that are compressed at once make one file: gzip reads one after the other.
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    parts = [lines[start : start + _PART_BYTES] for start in range(0, len(lines), _PART_BYTES)] or [b""]
    with ThreadPoolExecutor(min(len(parts), _MOST_THREADS)) as pool:
        compressed = list(pool.map(lambda part: gzip.compress(part, compresslevel=1, mtime=0), parts))
    write_atomic(path, b"".join(compressed))


def read_rollouts(paths: RunPaths, step: int, *, untrained: bool = False) -> Iterator[RolloutRecord]:
    """Read the records of batch `step`, or of what was dropped meanwhile. Raises UsageError when there are none."""
    path = paths.untrained_records(step) if untrained else paths.rollout_records(step)
    try:
        with gzip.open(path, "rb") as file:
            for line in file:
                yield msgspec.json.decode(line, type=RolloutRecord)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such record; `headway rollouts show RUN` lists the steps there are") from None
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise UsageError(f"{path}: not a rollout record ({error})") from None


def rollout_lines(path: Path, longest: int) -> Iterator[bytes]:
    """Read the encoded records of a file up to where it is damaged. Lines longer than `longest` bytes are cut."""
    try:
        with gzip.open(path, "rb") as file:
            while line := file.readline(longest):
                yield line
    except (OSError, EOFError, zlib.error):
        return


def rollout_step(name: str) -> int | None:
    """Return the step whose records the file of this name holds; None for another file."""
    match = _ROLLOUTS.fullmatch(name)
    return int(match[1]) if match and int(match[1]) < 2**31 else None


def recorded_steps(paths: RunPaths, *, untrained: bool = False) -> list[int]:
    folder = paths.untrained if untrained else paths.rollouts
    found = (rollout_step(file.name) for file in folder.glob("*.gz"))
    return sorted(step for step in found if step is not None)


class TrainedSample(msgspec.Struct):
    """One sample: `spans` are (start, length) of its sampled tokens, `logprobs` the trainer's, span after span."""

    key: BranchKey
    spans: list[tuple[int, int]]
    logprobs: Floats


class TrainedLogprobs(msgspec.Struct):
    """Samples of batch `step`, scored by the weights of version `step - 1`."""

    step: int
    samples: list[TrainedSample]


def write_trained_logprobs(paths: RunPaths, rank: int, record: TrainedLogprobs) -> None:
    write_atomic(paths.trained_logprobs(record.step, rank), encode(record))


def read_trained_logprobs(paths: RunPaths, step: int) -> list[TrainedSample]:
    """Read the samples of all ranks. A file that cannot be read counts as one that is not there."""
    samples: list[TrainedSample] = []
    for path in sorted(paths.logprobs.glob(f"step_{step:06d}_rank_*.msgpack")):
        try:
            if not path.is_symlink() and path.stat().st_size <= _LARGEST_LOGPROBS:
                samples += decode(TrainedLogprobs, path.read_bytes()).samples
        except (OSError, ValueError, msgspec.MsgspecError):
            continue
    return samples
