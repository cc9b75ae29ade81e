"""The adapters that an engine serves: names, versions and fingerprints."""

import time
from dataclasses import dataclass

from headway.core.protocol import WeightState, WeightUpdate


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """`slot` is the adapter's number in the engine."""

    slot: int
    version: int
    fingerprint: str
    epoch: int
    loaded_at: float


class AdapterTable:
    """The adapters that an engine serves, by name.

    `epoch` counts loads, so that KV of one version is never reused for another.
    """

    def __init__(self) -> None:
        self._served: dict[str, ServedAdapter] = {}
        self._epoch = 0

    def __contains__(self, name: str) -> bool:
        return name in self._served

    def versions(self) -> dict[str, int]:
        return {name: adapter.version for name, adapter in self._served.items()}

    def version(self, name: str) -> int:
        return self._served[name].version

    def weights(self, name: str) -> WeightState | None:
        adapter = self._served.get(name)
        return None if adapter is None else WeightState(adapter.version, adapter.fingerprint, adapter.loaded_at)

    def epoch(self, name: str | None) -> int:
        """Return the epoch of `name`; 0, the base model's, where that is no adapter."""
        return self._served[name].epoch if name in self._served else 0

    def fingerprint(self, name: str | None) -> str:
        """Return the fingerprint of adapter `name`, or its load's number where it has none; empty for no adapter."""
        adapter = self._served.get(name or "")
        return "" if adapter is None else adapter.fingerprint or str(adapter.epoch)

    def serves(self, update: WeightUpdate) -> bool:
        adapter = self._served.get(update.adapter or "")
        return adapter is not None and (adapter.version, adapter.fingerprint) == (update.version, update.fingerprint)

    def _record(self, update: WeightUpdate, slot: int) -> None:
        assert update.adapter is not None
        self._epoch += 1
        adapter = ServedAdapter(slot, update.version, update.fingerprint, self._epoch, time.time())
        # Readers in other threads see the old table or the new one, never one that changes under them.
        self._served = {**self._served, update.adapter: adapter}

    def _remove(self, name: str) -> ServedAdapter:
        self._served, removed = {n: a for n, a in self._served.items() if n != name}, self._served[name]
        return removed
