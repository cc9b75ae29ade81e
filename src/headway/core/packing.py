"""Packing of samples into micro-batches: full bins, equal work on every data rank.

Attention never crosses samples, so the work of a rank is the sum over its samples of a·n + b·n². First-fit-decreasing
bin packing fills the micro-batches, the Karmarkar–Karp differencing method deals them to the ranks, and single moves
and swaps even out what is left.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.batches import Batch, ComponentCounts, MicroBatch
from headway.core.samples import Sample

Plan = list[list[list[int]]]
"""`plan[rank][bin]` are indices of samples."""

MAX_REPAIRS = 256
CANDIDATES = 96
GOOD_ENOUGH = 0.002
"""Spread between the ranks' costs, as a share of their mean, at which repairs stop."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of a sequence of n tokens, in units of a token's matrix products: linear·n + quadratic·n²."""

    linear: float = 1.0
    quadratic: float = 1.0 / (12 * 1024)

    @classmethod
    def of_width(cls, width: int) -> "Cost":
        """Cost in a transformer of this width: matrix products cost 24·w² a token and layer, attention 2·w·n."""
        return cls(1.0, 1.0 / (12 * width))

    def of(self, lengths: NDArray[Any]) -> NDArray[np.float64]:
        n = lengths.astype(np.float64)
        return self.linear * n + self.quadratic * n * n


def make_batch(step: int, samples: Sequence[Sample], *, seq_len: int, ranks: int, cost: Cost) -> Batch:
    """Pack `samples`, each at most `seq_len` tokens long, for `ranks` data ranks."""
    plan = plan_packing([len(sample) for sample in samples], seq_len, ranks, cost)
    dealt = [[MicroBatch.join([samples[i] for i in bin_]) for bin_ in rank] for rank in plan]
    return Batch(step, dealt, ComponentCounts.of(samples))


def plan_packing(lengths: Sequence[int], seq_len: int, ranks: int, cost: Cost) -> Plan:
    """Deal samples to bins of `seq_len` tokens, equally many bins per rank.

    Every index appears once. Bins are empty only when there are fewer samples than ranks. Raises ValueError
    when a sample is empty or longer than a bin.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and (sizes.min() < 1 or sizes.max() > seq_len):
        raise ValueError(f"samples must have 1 to {seq_len} tokens, got {sizes.min()} to {sizes.max()}")
    bins = _first_fit_decreasing(sizes, seq_len)
    bins += [[] for _ in range(-len(bins) % ranks or (0 if bins else ranks))]
    _fill_empty(bins)
    costs = cost.of(sizes)
    dealt = _deal([float(costs[bin_].sum()) for bin_ in bins], ranks)
    plan = [[bins[b] for b in rank] for rank in dealt]
    if ranks > 1:
        plan = _Repair(plan, sizes, costs, seq_len).run()
    # Ranks meet at every micro-batch, so the i-th ones should be alike: heaviest first on every rank.
    return [sorted(rank, key=lambda bin_: -float(costs[bin_].sum())) for rank in plan]


def _first_fit_decreasing(sizes: NDArray[np.int64], seq_len: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free = np.full(max(len(sizes), 1), seq_len, dtype=np.int64)
    for index in np.argsort(-sizes, kind="stable"):
        size = sizes[index]
        place = int(np.argmax(free[: len(bins) + 1] >= size))
        if place == len(bins):
            bins.append([])
        bins[place].append(int(index))
        free[place] -= size
    return bins


def _fill_empty(bins: list[list[int]]) -> None:
    """Give empty bins a sample of the fullest ones, as long as one can spare it."""
    for empty in (bin_ for bin_ in bins if not bin_):
        donor = max(bins, key=len)
        if len(donor) < 2:
            return
        half = len(donor) // 2
        empty.extend(donor[half:])
        del donor[half:]


def _deal(costs: list[float], ranks: int) -> list[list[int]]:
    """Equally many bins per rank with nearly equal sums (Karmarkar–Karp, balanced by cardinality).

    Tuples of one bin per rank are merged, widest spread first, the largest share of one with the smallest of
    the other.
    """
    order = sorted(range(len(costs)), key=lambda b: -costs[b])
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for serial, start in enumerate(range(0, len(order), ranks)):
        shares = [(costs[b], [b]) for b in order[start : start + ranks]]
        heap.append((shares[-1][0] - shares[0][0], serial, shares))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda share: -share[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [members for _, members in heap[0][2]]


class _Repair:
    """Moves and swaps single samples between the heaviest and the lightest rank while that narrows their gap."""

    def __init__(self, plan: Plan, sizes: NDArray[np.int64], costs: NDArray[np.float64], seq_len: int) -> None:
        self.ranks, self.bins_per_rank = len(plan), len(plan[0])
        self.sizes, self.costs = sizes, costs
        self.bin_of = np.zeros(len(sizes), dtype=np.int64)
        for b, members in enumerate(bin_ for rank in plan for bin_ in rank):
            self.bin_of[members] = b
        bins = self.ranks * self.bins_per_rank
        self.free = seq_len - np.bincount(self.bin_of, weights=sizes, minlength=bins).astype(np.int64)
        self.members = np.bincount(self.bin_of, minlength=bins)

    def run(self) -> Plan:
        for _ in range(MAX_REPAIRS):
            rank_of = self.bin_of // self.bins_per_rank
            loads = np.bincount(rank_of, weights=self.costs, minlength=self.ranks)
            heavy, light = int(loads.argmax()), int(loads.argmin())
            gap = float(loads[heavy] - loads[light])
            if gap <= GOOD_ENOUGH * loads.mean() or not self._narrow(rank_of, heavy, light, gap):
                break
        plan: Plan = [[[] for _ in range(self.bins_per_rank)] for _ in range(self.ranks)]
        for index in np.argsort(self.bin_of, kind="stable"):
            rank, place = divmod(int(self.bin_of[index]), self.bins_per_rank)
            plan[rank][place].append(int(index))
        return plan

    def _narrow(self, rank_of: NDArray[np.int64], heavy: int, light: int, gap: float) -> bool:
        """One move or swap, whichever comes nearer to halving the gap; False where none narrows it."""
        givers = self._candidates(np.flatnonzero(rank_of == heavy))
        takers = self._candidates(np.flatnonzero(rank_of == light))
        light_bins = slice(light * self.bins_per_rank, (light + 1) * self.bins_per_rank)
        roomiest = light_bins.start + int(self.free[light_bins].argmax())

        can_move = (self.sizes[givers] <= self.free[roomiest]) & (self.members[self.bin_of[givers]] > 1)
        after_move = np.where(can_move, np.abs(gap - 2 * self.costs[givers]), np.inf)
        grown = self.sizes[givers][:, None] - self.sizes[takers][None, :]
        fits = (grown <= self.free[self.bin_of[takers]][None, :]) & (-grown <= self.free[self.bin_of[givers]][:, None])
        difference = self.costs[givers][:, None] - self.costs[takers][None, :]
        after_swap = np.where(fits, np.abs(gap - 2 * difference), np.inf)

        best_move = float(after_move.min(initial=np.inf))
        best_swap = float(after_swap.min(initial=np.inf))
        if min(best_move, best_swap) >= gap * 0.999:
            return False
        if best_move <= best_swap:
            self._put(int(givers[after_move.argmin()]), roomiest)
        else:
            g, t = divmod(int(after_swap.argmin()), len(takers))
            giver, taker = int(givers[g]), int(takers[t])
            there, here = int(self.bin_of[taker]), int(self.bin_of[giver])
            self._put(giver, there)
            self._put(taker, here)
        return True

    def _candidates(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """At most CANDIDATES of them, spread evenly over the sizes."""
        if len(indices) <= CANDIDATES:
            return indices
        ordered = indices[np.argsort(self.sizes[indices], kind="stable")]
        return ordered[np.linspace(0, len(ordered) - 1, CANDIDATES).astype(np.int64)]

    def _put(self, sample: int, bin_: int) -> None:
        old = int(self.bin_of[sample])
        self.free[old] += self.sizes[sample]
        self.free[bin_] -= self.sizes[sample]
        self.members[old] -= 1
        self.members[bin_] += 1
        self.bin_of[sample] = bin_
