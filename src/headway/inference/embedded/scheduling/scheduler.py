"""The scheduler: which sequences run in the next step, and how many tokens of each. No clock, tensors or threads."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from headway.inference.embedded.scheduling.blocks import BlockCache, chain_hash
from headway.inference.embedded.scheduling.sequence import Sequence

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`max_model_len` bounds prompt plus output; the cache always has room for one such sequence."""

    max_running: int
    max_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    prefix_cache: bool = True


@dataclass(slots=True)
class Step:
    """`counts[i]` tokens of `sequences[i]` are run, starting at its `computed`. `admitted` got a row just now, `grown`
    more blocks."""

    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    grown: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching with chunked prefill: decoding sequences first, then partial prompts, then new ones.

    New sequences start in the order (priority, arrival) and never overtake, so short prompts cannot starve a long
    one. When blocks run out, the last sequence in that order that is not yet in the step is preempted: it loses its
    blocks, keeps its tokens, and is recomputed later.
    """

    def __init__(self, cache: BlockCache, limits: EngineLimits, root_of: Callable[[Sequence], bytes]) -> None:
        """`root_of` returns the root hash of a sequence that starts now (salt, adapter, weights)."""
        self.cache = cache
        self.limits = limits
        self.preemptions = 0
        self.hold = False
        """While set, no new sequence starts; started ones run to their end."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._root_of = root_of
        self._rows = list(range(limits.max_running))
        self._reserve = cache.num_blocks // 100

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or aborted sequence, running or waiting."""
        if sequence.row >= 0:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> Step:
        """Choose the next step, assign its blocks and register the full ones."""
        step = Step()
        budget, size = self.limits.max_batched_tokens, self.cache.block_size
        preempted = self.preemptions
        for sequence, pending in self._decoding_first():
            count = min(pending, budget)
            if count == 0 or sequence.row < 0:
                continue
            fits = sequence.computed + count <= len(sequence.blocks) * size
            if fits or self._make_room(sequence, count, step):
                self._put(step, sequence, count)
                budget -= count
        if preempted == self.preemptions:
            self._admit(step, budget)
        return step

    def may_preempt(self) -> bool:
        """Tell if the next step needs more blocks than are free, so that a sequence would be preempted."""
        free, budget = self.cache.free_blocks, self.limits.max_batched_tokens
        if free >= len(self.running) + budget // self.cache.block_size:
            return False
        needed = 0
        for sequence, pending in self._decoding_first():
            count = min(pending, budget)
            needed += max(0, self._missing(sequence, count))
            budget -= count
        return needed > free

    def _decoding_first(self) -> list[tuple[Sequence, int]]:
        """Running sequences with their pending tokens, decoding ones first."""
        everyone = [(s, s.pending) for s in self.running]
        partial = [(s, pending) for s, pending in everyone if pending > 1]
        return [(s, pending) for s, pending in everyone if pending == 1] + partial if partial else everyone

    def _admit(self, step: Step, budget: int) -> None:
        while self._rows and budget > 0 and (sequence := self._first_in_line()):
            root = self._root_of(sequence)
            blocks, hashes = ([], []) if sequence.wants_prompt_logprobs else self.cache.match(sequence.tokens, root)
            missing = self.cache.blocks_for(len(sequence)) - len(blocks)
            # Blocks for the whole prompt and a reserve for running sequences: an early preemption would waste the work.
            reserve = self._reserve if self.running else 0
            if missing + reserve > self.cache.free_after_sharing(blocks):
                return
            self.waiting.remove(sequence)
            self.cache.share(blocks)
            sequence.root, sequence.blocks, sequence.hashes = root, blocks, hashes
            sequence.computed = len(blocks) * self.cache.block_size
            if not sequence.preemptions:
                sequence.cached = sequence.computed
            sequence.row = heappop(self._rows)
            insort(self.running, sequence, key=_order)
            count = min(sequence.pending, budget)
            sequence.blocks += self.cache.take(self._missing(sequence, count))
            self._put(step, sequence, count)
            step.admitted.append(sequence)
            budget -= count

    def _first_in_line(self) -> Sequence | None:
        if self.hold:
            return next((s for s in self.waiting if s.preemptions), None)
        return self.waiting[0] if self.waiting else None

    def _make_room(self, sequence: Sequence, count: int, step: Step) -> bool:
        """Allocate blocks for `count` more tokens, preempting other sequences or, as a last resort, this one."""
        while (missing := self._missing(sequence, count)) > self.cache.free_blocks:
            scheduled = set(map(id, step.sequences))
            victim = next(s for s in reversed(self.running) if id(s) not in scheduled)
            self._preempt(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.blocks += self.cache.take(missing)
            step.grown.append(sequence)
        return True

    def _missing(self, sequence: Sequence, count: int) -> int:
        return -((sequence.computed + count) // -self.cache.block_size) - len(sequence.blocks)

    def _put(self, step: Step, sequence: Sequence, count: int) -> None:
        step.sequences.append(sequence)
        step.counts.append(count)
        if not self.cache.prefix_cache:
            return
        size = self.cache.block_size
        # A block is hashed by its tokens; if the last one is still in flight, it is hashed a step later.
        full = min(sequence.computed + count, len(sequence.tokens)) // size
        while len(sequence.hashes) < full:
            start = len(sequence.hashes) * size
            parent = sequence.hashes[-1] if sequence.hashes else sequence.root
            name = chain_hash(parent, sequence.tokens[start : start + size])
            self.cache.register(sequence.blocks[len(sequence.hashes)], name)
            sequence.hashes.append(name)

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        sequence.computed = 0
        insort(self.waiting, sequence, key=_order)

    def _release(self, sequence: Sequence) -> None:
        self.cache.release(sequence.blocks)
        sequence.blocks, sequence.hashes = [], []
        heappush(self._rows, sequence.row)
        sequence.row = -1
