"""The LoRA adapters that the embedded engine serves, in slots of the model's bank."""

import torch
from torch import Tensor

from headway.config.shared import LoraSettings
from headway.core.protocol import WeightUpdate
from headway.inference.engine import AdapterTable
from headway.models.adapters.lora import drop_adapter, load_adapter
from headway.models.decoder import DecoderLM
from headway.models.layers.linear import join_adapters


class ServedAdapters(AdapterTable):
    """Adapters by name; a batch may mix them, since every token names its slot."""

    def __init__(self, model: DecoderLM) -> None:
        super().__init__()
        self._model = model

    def slot(self, name: str | None) -> int:
        """Return the slot of `name`; -1, the base model, for None."""
        return -1 if name is None else self._served[name].slot

    def load(self, update: WeightUpdate, tensors: dict[str, Tensor], settings: LoraSettings) -> None:
        """Load an adapter, or replace its version. On HeadwayError nothing has changed."""
        slot = self._served[update.adapter].slot if update.adapter in self._served else self._free_slot()
        with torch.inference_mode():
            load_adapter(self._model, slot, tensors.items(), settings)
            if self._model.head_weight().is_cuda:
                join_adapters(self._model)
        self._record(update, slot)

    def drop(self, name: str) -> None:
        with torch.inference_mode():
            drop_adapter(self._model, self._served[name].slot)
        self._remove(name)

    def _free_slot(self) -> int:
        taken = {adapter.slot for adapter in self._served.values()}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)
