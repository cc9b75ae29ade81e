"""The LoRA adapters that an engine serves: names, versions, and slots in the model's bank."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.config.shared import LoraSettings
from headway.models.adapters.lora import drop_adapter, load_adapter
from headway.models.decoder import DecoderLM


@dataclass(frozen=True, slots=True)
class _Loaded:
    slot: int
    version: int
    epoch: int


class ServedAdapters:
    """Adapters by name; a batch may mix them, since every token names its slot.

    `epoch` counts loads, so that KV of one version is never reused for another.
    """

    def __init__(self, model: DecoderLM) -> None:
        self._model = model
        self._loaded: dict[str, _Loaded] = {}
        self._epoch = 0

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    def versions(self) -> dict[str, int]:
        return {name: loaded.version for name, loaded in self._loaded.items()}

    def version(self, name: str) -> int:
        return self._loaded[name].version

    def slot(self, name: str | None) -> int:
        """Return the slot of `name`; -1, the base model, for None."""
        return -1 if name is None else self._loaded[name].slot

    def epoch(self, name: str | None) -> int:
        return 0 if name is None else self._loaded[name].epoch

    def load(self, name: str, version: int, tensors: dict[str, Tensor], settings: LoraSettings) -> None:
        """Load an adapter, or replace its version. On HeadwayError nothing has changed."""
        slot = self._loaded[name].slot if name in self._loaded else self._free_slot()
        with torch.inference_mode():
            load_adapter(self._model, slot, tensors.items(), settings)
        self._epoch += 1
        # Readers in other threads see the old table or the new one, never one that changes under them.
        self._loaded = {**self._loaded, name: _Loaded(slot, version, self._epoch)}

    def drop(self, name: str) -> None:
        with torch.inference_mode():
            drop_adapter(self._model, self._loaded[name].slot)
        self._loaded = {other: loaded for other, loaded in self._loaded.items() if other != name}

    def _free_slot(self) -> int:
        taken = {loaded.slot for loaded in self._loaded.values()}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)
