"""Speeds of one engine and of one trainer: what a plan knows about the devices of a run."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, kw_only=True)
class EngineSpeed(ABC):
    """One engine. It decodes a token of every running sequence in each step, and prompts take the time of all.

    `request_seconds` pass between an episode and its engine for every reply, `update_seconds` until it serves a new
    version. `slower` is what a run has shown it to be slower by.
    """

    prefill_seconds: float
    """Work for one token of a prompt."""
    admission_seconds: float = 0.0
    """Work for a request, whatever it asks for."""
    kv_tokens: int
    max_running: int
    request_seconds: float = 0.0
    update_seconds: float = 0.0
    slower: float = 1.0

    def step_seconds(self, running: int, context: float) -> float:
        """Seconds of a step that decodes `running` sequences, of `context` tokens together."""
        return self.slower * self.decode(running, context)

    def prompt_seconds(self, tokens: int) -> float:
        """Seconds of a request until decoding begins, `tokens` of whose prompt are not in the cache."""
        return self.slower * (self.admission_seconds + self.prefill_seconds * tokens)

    @abstractmethod
    def decode(self, running: int, context: float) -> float: ...

    def times(self, factor: float) -> Self:
        """The same engine, slower by `factor`."""
        return replace(self, slower=self.slower * factor)


@dataclass(frozen=True, kw_only=True)
class LinearEngine(EngineSpeed):
    """An engine whose steps take a fixed time, and more for every sequence and every token that they attend to."""

    fixed: float
    per_sequence: float
    per_context_token: float = 0.0

    def decode(self, running: int, context: float) -> float:
        return self.fixed + self.per_sequence * running + self.per_context_token * context


@dataclass(frozen=True, kw_only=True)
class TrainerSpeed(ABC):
    """All ranks of a trainer together. `publish_seconds` pass from a step's end until its weights are announced."""

    publish_seconds: float = 0.0
    slower: float = 1.0

    def step_seconds(self, lengths: Sequence[int]) -> float:
        """Seconds of a step on samples of these `lengths`."""
        return self.slower * self.train(lengths)

    @abstractmethod
    def train(self, lengths: Sequence[int]) -> float: ...

    def times(self, factor: float) -> Self:
        """The same trainer, slower by `factor`."""
        return replace(self, slower=self.slower * factor)


@dataclass(frozen=True, kw_only=True)
class LinearTrainer(TrainerSpeed):
    """A trainer whose steps take a fixed time, and more for every token."""

    fixed: float
    per_token: float

    def train(self, lengths: Sequence[int]) -> float:
        return self.fixed + self.per_token * sum(lengths)


@dataclass(frozen=True)
class Speeds:
    """An engine, a trainer, and what they share: `threads` of each on `cores` where they compute on one CPU; None
    where each has devices of its own. `host_seconds` of a core go to orchestrator and environments for a reply."""

    engine: EngineSpeed
    trainer: TrainerSpeed
    cores: float | None = None
    threads: float = 1.0
    host_seconds: float = 0.0
