"""The mix of environments: shares as close to the ratios as whole groups allow."""

from collections.abc import Mapping, Sequence


class Mix:
    """Picks the environment that is furthest behind its share of the episodes so far. `counts` is the whole state."""

    def __init__(self, ratios: Mapping[str, float]) -> None:
        total = sum(ratios.values())
        self._shares = {name: ratio / total for name, ratio in ratios.items()}
        self.counts: dict[str, int] = dict.fromkeys(ratios, 0)

    def pick(self, available: Sequence[str]) -> str | None:
        """Pick one of `available`; None when there is none."""
        return min(available, key=lambda name: self.counts[name] / self._shares[name], default=None)

    def took(self, name: str, episodes: int) -> None:
        self.counts[name] += episodes

    def load(self, counts: Mapping[str, int]) -> None:
        """Restore saved counts. An environment that was added since starts at its share, not with a debt."""
        known = {name: int(counts[name]) for name in self.counts if name in counts}
        level = max((count / self._shares[name] for name, count in known.items()), default=0.0)
        self.counts = {name: known.get(name, int(level * self._shares[name])) for name in self.counts}
