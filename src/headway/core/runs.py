"""The layout of a run directory: every name in one place, so that processes find each other's files."""

import re
from dataclasses import dataclass
from pathlib import Path

CHECKPOINT_MARKER = "COMPLETE"
"""File that a checkpoint gets last: without it the folder is half-written, and nobody reads it."""

_STEP = re.compile(r"step_(\d+)")


class _Under:
    """A path below the root of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: "RunPaths", owner: type["RunPaths"]) -> Path:
        return paths.root / self._name


@dataclass(frozen=True)
class RunPaths:
    """`outputs/<run>/` and what lies in it. Steps and versions are zero-padded, so that names sort."""

    root: Path

    record = _Under("run.json")
    """The record of who started the run, when and how. A folder with one is a run."""
    environments = _Under("environments.json")
    """The record of the code that the run's environments were loaded from."""
    config = _Under("config")
    logs = _Under("logs")
    metrics = _Under("metrics")
    batches = _Under("batches")
    """Batches on their way to the trainer. The orchestrator removes what two complete checkpoints cover."""
    rollouts = _Under("rollouts")
    """Records of trained episodes, for people."""
    untrained = _Under("untrained")
    """Records of some episodes that failed or were dropped, with the cause, for people."""
    images = _Under("images")
    """Images of recorded episodes, each once, by the hash of its bytes."""
    journal = _Under("journal.bin")
    """The orchestrator's inputs and decisions, in order: what a replay needs beside the trained episodes."""
    logprobs = _Under("logprobs")
    """Records of the trainer's logprobs of sampled tokens, for people."""
    checkpoints = _Under("checkpoints")
    weights = _Under("weights")
    """Published versions and their announcements."""
    evaluations = _Under("evaluations")
    exports = _Under("exports")
    swarm = _Under("swarm")
    """Key, ledger, versions and verified groups of a swarm, which `headway swarm serve` keeps."""
    control = _Under("control")
    """Addresses, the run's token, process ids. Readable by the owner only."""

    def batch(self, step: int) -> Path:
        return self.batches / f"step_{step:06d}"

    def rollout_records(self, step: int) -> Path:
        return self.rollouts / f"step_{step:06d}.jsonl.gz"

    def untrained_records(self, step: int) -> Path:
        return self.untrained / f"step_{step:06d}.jsonl.gz"

    def trained_logprobs(self, step: int, rank: int) -> Path:
        return self.logprobs / f"step_{step:06d}_rank_{rank:03d}.msgpack"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def complete_checkpoints(self) -> list[int]:
        """Steps whose checkpoint is whole, in order: the marker is written last."""
        found = (_STEP.fullmatch(marker.parent.name) for marker in self.checkpoints.glob(f"step_*/{CHECKPOINT_MARKER}"))
        return sorted(int(match[1]) for match in found if match)

    def spooled_batches(self) -> list[int]:
        """Steps of the batches on disk, in order."""
        found = (_STEP.fullmatch(folder.name) for folder in self.batches.glob("step_*"))
        return sorted(int(match[1]) for match in found if match)

    def version(self, version: int) -> Path:
        return self.weights / f"v{version:06d}"

    def announcement(self, version: int) -> Path:
        return self.weights / f"v{version:06d}.json"
