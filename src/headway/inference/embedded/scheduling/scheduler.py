"""The scheduler: which sequences run in the next step, and how many tokens of each. No clock, tensors or threads."""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from headway.inference.embedded.scheduling.blocks import BlockCache, chain_hash
from headway.inference.embedded.scheduling.sequence import Sequence
from headway.inference.embedded.scheduling.state_prefixes import StatePrefixes
from headway.inference.embedded.scheduling.whole_images import WholeImages
from headway.models.costs import MOST_SNAPSHOTS

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`max_model_len` bounds prompt plus output; the cache always has room for one such sequence. `num_snapshots` of
    recurrent states are kept at once, for prefixes; None: as many as can be of use. `max_adapters` have slots on the
    device, `max_host_adapters` are kept in host memory. `kv_fp8`: the cache is in FP8."""

    max_running: int
    max_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    prefix_cache: bool = True
    num_snapshots: int | None = None
    max_adapters: int = 8
    max_host_adapters: int = 64
    kv_fp8: bool = False

    @property
    def snapshots(self) -> int:
        return MOST_SNAPSHOTS * self.max_running if self.num_snapshots is None else self.num_snapshots


@dataclass(slots=True)
class Step:
    """`counts[i]` tokens of `sequences[i]` are run, starting at its `computed`. `admitted` got a row just now, `grown`
    more blocks. `saved` are the rows whose recurrent states are saved after the step, and the slots they go to. A step
    in which every sequence decodes may be run `repeats` times in a row, each time with the tokens just sampled."""

    sequences: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    grown: list[Sequence] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)
    repeats: int = 1


class Scheduler:
    """Continuous batching with chunked prefill: decoding sequences first, then partial prompts, then new ones.

    New sequences start in the order (priority, arrival) and never overtake, so short prompts cannot starve a long
    one. When blocks run out, the last sequence in that order that is not yet in the step is preempted: it loses its
    blocks, keeps its tokens, and is recomputed later.
    """

    def __init__(
        self,
        cache: BlockCache,
        limits: EngineLimits,
        root_of: Callable[[Sequence], bytes],
        *,
        whole_images: bool = False,
    ) -> None:
        """`root_of` returns the root hash of a sequence that starts now (salt, adapter, weights). `whole_images`: no
        step may end inside of an image."""
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
        self._states = None if cache.snapshots is None else StatePrefixes(cache, cache.snapshots)
        self._images = WholeImages(cache.block_size) if whole_images else None

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or aborted sequence, running or waiting."""
        if sequence.row >= 0:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)

    def schedule(self, most_repeats: int = 1) -> Step:
        """Choose the next step, assign its blocks and register the full ones."""
        running = self._decoding_first()
        step = Step(repeats=self._repeats(running, most_repeats))
        budget, size = self.limits.max_batched_tokens, self.cache.block_size
        preempted = self.preemptions
        if self._states is not None:
            self._states.settle()
        for sequence, pending in running:
            count = self._limit(sequence, min(pending, budget))
            if count <= 0 or sequence.row < 0:
                continue
            last = count + step.repeats - 1
            fits = sequence.computed + last <= len(sequence.blocks) * size
            if fits or self._make_room(sequence, last, step):
                self._put(step, sequence, count)
                budget -= count
        if preempted == self.preemptions:
            self._admit(step, budget)
        return step

    def may_preempt(self) -> bool:
        """Tell if the next step needs more blocks than are free, so that a sequence would be preempted."""
        free, budget = self.cache.free_blocks, self.limits.max_batched_tokens
        # A whole image may be more than the budget.
        if self._images is None and free >= len(self.running) + budget // self.cache.block_size:
            return False
        needed = 0
        for sequence, pending in self._decoding_first():
            count = self._limit(sequence, min(pending, max(budget, 0)))
            needed += max(0, self._missing(sequence, count))
            budget -= count
        return needed > free

    def _repeats(self, running: list[tuple[Sequence, int]], most: int) -> int:
        """Count how often the next step can be repeated: everyone decodes and has room, and nobody could start
        meanwhile. Sequences that end in between get tokens that are dropped, so at least one must want the last."""
        if most == 1 or not running or self._states is not None or (self.waiting and self._rows):
            return 1
        if any(pending > 1 for _, pending in running):
            return 1
        wanted = max(s.limit - len(s.tokens) - s.ahead for s, _ in running)
        room = self.limits.max_model_len - max(s.computed for s, _ in running)
        repeats = max(1, min(most, wanted, room))
        enough = len(running) * (1 + repeats // self.cache.block_size) <= self.cache.free_blocks
        return repeats if enough else 1

    def _decoding_first(self) -> list[tuple[Sequence, int]]:
        """Running sequences with their pending tokens, decoding ones first."""
        everyone = [(s, s.pending) for s in self.running]
        partial = [(s, pending) for s, pending in everyone if pending > 1]
        return [(s, pending) for s, pending in everyone if pending == 1] + partial if partial else everyone

    def _admit(self, step: Step, budget: int) -> None:
        while self._rows and budget > 0 and (sequence := self._first_in_line()):
            root = self._root_of(sequence)
            if (prefix := self._prefix(sequence, root)) is None:
                return
            blocks, hashes = prefix
            missing = self.cache.blocks_for(len(sequence)) - len(blocks)
            # Blocks for the whole prompt and a reserve for running sequences: an early preemption would waste the work.
            reserve = self._reserve if self.running else 0
            if missing + reserve > self.cache.free_after_sharing(blocks):
                return
            self.waiting.remove(sequence)
            self.cache.share(blocks)
            below = self._below(sequence, root, hashes)
            sequence.root, sequence.mixed = root, False
            sequence.blocks, sequence.hashes = blocks + self.cache.restore(below), hashes + below
            sequence.computed = len(sequence.blocks) * self.cache.block_size
            if not sequence.preemptions:
                sequence.cached = sequence.computed
            sequence.row = heappop(self._rows)
            insort(self.running, sequence, key=_order)
            count = self._limit(sequence, min(sequence.pending, budget))
            sequence.blocks += self.cache.take(self._missing(sequence, count))
            self._put(step, sequence, count)
            step.admitted.append(sequence)
            budget -= count

    def _prefix(self, sequence: Sequence, root: bytes) -> tuple[list[int], list[bytes]] | None:
        """Cached blocks to start from, and their hashes; None: wait for more."""
        if sequence.wants_prompt_logprobs:
            return [], []
        if self._states is not None:
            return self._states.find(sequence, root, self.running)
        blocks, hashes = self.cache.match(sequence.content, root)
        whole = self._whole_blocks(sequence, len(blocks))
        return blocks[:whole], hashes[:whole]

    def _below(self, sequence: Sequence, root: bytes, hashes: list[bytes]) -> list[bytes]:
        """Hashes of the blocks after those of `hashes` that the lower tier has."""
        if sequence.wants_prompt_logprobs:
            return []
        below = self.cache.match_below(sequence.content, root, hashes)
        return below[: self._whole_blocks(sequence, len(hashes) + len(below)) - len(hashes)]

    def _whole_blocks(self, sequence: Sequence, blocks: int) -> int:
        return blocks if self._images is None else self._images.whole_blocks(sequence, blocks)

    def _limit(self, sequence: Sequence, count: int) -> int:
        """Bound the tokens of a step by where it has to end."""
        if self._images is not None:
            return self._images.limit(sequence, count)
        return count if self._states is None else self._states.limit(sequence, count)

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
            name = chain_hash(parent, sequence.content[start : start + size])
            if not sequence.mixed:
                self.cache.register(sequence.blocks[len(sequence.hashes)], name)
            sequence.hashes.append(name)
        if self._states is not None and (saved := self._states.save(sequence, count)) is not None:
            step.saved.append(saved)

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        sequence.computed = 0
        insort(self.waiting, sequence, key=_order)

    def _release(self, sequence: Sequence) -> None:
        self.cache.release(sequence.blocks)
        if self._states is not None:
            self._states.release(sequence)
        sequence.blocks, sequence.hashes = [], []
        heappush(self._rows, sequence.row)
        sequence.row = -1
