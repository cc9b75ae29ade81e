"""Who runs in the next step, and how many tokens of each. Pure: no clock, no tensors, no threads."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from headway.inference.embedded.scheduling.blocks import BlockCache, chain_hash
from headway.inference.embedded.scheduling.sequence import Sequence

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Limits:
    max_running: int
    max_batched_tokens: int


@dataclass(slots=True)
class Step:
    """`counts[i]` tokens of `sequences[i]` are run, starting at its `computed`. `admitted` got a row just now, `grown`
    more blocks."""

    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    grown: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Decoding sequences go first, then prompts that are partly done, then new ones in the order of the line.

    The order is (priority, arrival). Nobody overtakes: when the first in line does not fit, those behind wait,
    so that a long prompt is never starved by short ones. When blocks run out, the last in the order of those
    not yet in this step gives up its blocks and is computed anew later; its tokens stay.
    """

    def __init__(self, cache: BlockCache, limits: Limits, root_of: Callable[[Sequence], bytes]) -> None:
        """`root_of` names the prefix chain of a sequence that starts now (salt, adapter, weights)."""
        self.cache = cache
        self.limits = limits
        self.preemptions = 0
        self.hold = False
        """While set, nothing new starts; what had started goes on to its end."""
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._root_of = root_of
        self._rows = list(range(limits.max_running))
        self._reserve = cache.num_blocks // 100

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """A sequence that finished or was aborted, wherever it is."""
        if sequence.row >= 0:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> Step:
        """Choose the next step; its blocks are assigned, its full blocks registered."""
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

    def crowded(self) -> bool:
        """Whether the next step needs more blocks than are free, so that someone would have to give up theirs."""
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
        """Those that run, with what is pending of each."""
        everyone = [(s, s.pending) for s in self.running]
        partial = [(s, pending) for s, pending in everyone if pending > 1]
        return [(s, pending) for s, pending in everyone if pending == 1] + partial if partial else everyone

    def _admit(self, step: Step, budget: int) -> None:
        while self._rows and budget > 0 and (sequence := self._first_in_line()):
            root = self._root_of(sequence)
            blocks, hashes = ([], []) if sequence.wants_prompt_logprobs else self.cache.match(sequence.tokens, root)
            missing = self.cache.blocks_for(len(sequence)) - len(blocks)
            # Room for the whole prompt, and a little for those that run: starting what must soon stop is waste.
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
        """Get the blocks for `count` more tokens, preempting others or, as the last resort, the sequence itself."""
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
        # A block is named by its tokens: one whose last is on its way gets its name a step later.
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
