"""A reply that grows while engines come and go: what one has sampled, another continues."""

import numpy as np

from headway.core.protocol import GenerateChunkChoice, RoutedExperts
from headway.envs.tree import KeptBy


class PartialReply:
    """Tokens of one reply so far, sampled by one engine after the other. `finish_reason` is None until it is whole.

    `routed` counts the tokens from the prompt's first on whose routed experts are known: an engine that leaves sends
    those of its tokens; of an engine that dies they are lost, and its successor computes them again.
    """

    def __init__(self, routed: int = 0) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[tuple[int, int]] = []
        self.finish_reason: str | None = None
        self.kv_ticket: str | None = None
        """Names the engine that has the KV of what has come so far, where the next one is to fetch it."""
        self.kept_by: KeptBy | None = None
        self.routed = routed
        self._first_routed = routed
        self._records: list[RoutedExperts] = []
        self._earlier: tuple[int, list[tuple[int, int]]] = (0, [])

    def __len__(self) -> int:
        return len(self.token_ids)

    def begin(self) -> None:
        """Start a call to another engine."""
        self._earlier = len(self.token_ids), list(self.versions)

    def undo(self) -> None:
        """Drop what the last call has brought, because the engine gave it up."""
        count, self.versions = self._earlier
        del self.token_ids[count:], self.logprobs[count:]
        self._earlier = count, list(self.versions)

    def restart(self) -> None:
        """Drop all tokens, because the engine at hand cannot continue those of another."""
        self._earlier = 0, []
        self.undo()
        self._records.clear()
        self.routed, self.kv_ticket = self._first_routed, None

    def extend(self, choice: GenerateChunkChoice, version: int) -> None:
        """Add a chunk of the call. `version` is that of tokens whose engine does not say. Raises ValueError where the
        chunk has no logprob for a token."""
        logprobs = choice.logprob_values()
        if len(logprobs) != len(choice.token_ids):
            raise ValueError("the engine sent no logprob for some of its tokens")
        self.token_ids += choice.token_ids
        self.logprobs += logprobs
        count, before = self._earlier
        self.versions = merge_runs(before, choice.versions or [(version, len(self.token_ids) - count)])
        if choice.routed_experts is not None:
            self._records.append(choice.routed_experts)
            self.routed = choice.routed_experts.end
        self.finish_reason = None if choice.finish_reason == "migrate" else choice.finish_reason

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """The routed experts of all calls as one record."""
        if len(self._records) < 2:
            return self._records[0] if self._records else None
        joined = np.concatenate([record.array() for record in self._records])
        return RoutedExperts.of(joined, self._records[0].start, packed=True)


def merge_runs(first: list[tuple[int, int]], then: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join runs of (version, count); an engine without new tokens adds none."""
    runs = list(first)
    for version, count in then:
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + count)
        elif count:
            runs.append((version, count))
    return runs
