"""The LoRA adapters that the embedded engine serves: those in use in slots of the model's bank, all in host memory."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.config.shared import LoraSettings
from headway.core.protocol import WeightUpdate
from headway.inference.adapter_table import AdapterTable
from headway.models.adapters.lora import drop_adapter, load_adapter, resize_bank
from headway.models.adapters.peft import adapter_pairs
from headway.models.decoder import DecoderLM
from headway.models.layers.linear import join_adapters

BASE, AWAY = -1, -2
"""In place of a slot: of the base model, and of an adapter that waits in host memory."""


class ServedAdapters(AdapterTable):
    """Adapters by name; a batch may mix them, since every token names its slot.

    The bank has at most `most` slots, unless running sequences use more adapters than that. Where another is needed,
    the one that was used longest ago gives up its slot; a request brings it back from host memory, bit-identical. Slots
    stay where they are, so graphs that were captured stay valid. Host memory keeps `kept` adapters; beyond that, the
    one that was used longest ago is forgotten.
    """

    def __init__(self, model: DecoderLM, most: int = 8, kept: int = 64) -> None:
        super().__init__()
        self.most = most
        self._kept = max(most, kept)
        self._model = model
        self._copies: OrderedDict[str, tuple[dict[str, Tensor], LoraSettings]] = OrderedDict()
        """In host memory, the one that was used last at the end."""

    def slot(self, name: str | None) -> int:
        """Return the slot of `name`; BASE for None."""
        return BASE if name is None else self._served[name].slot

    def bring(self, name: str | None, in_use: Collection[str | None]) -> int:
        """Return the slot of an adapter, brought back where it was away. Those `in_use` keep theirs."""
        if name is None:
            return BASE
        self._copies.move_to_end(name)
        slot = self.slot(name)
        if slot == AWAY:
            slot = self._free_slot(in_use)
            self._put(slot, *self._unpacked(name))
            self._move(name, slot)
        return slot

    def load(
        self,
        update: WeightUpdate,
        tensors: dict[str, Tensor],
        settings: LoraSettings,
        *,
        copies: dict[str, Tensor] | None = None,
        in_use: Collection[str | None] = (),
    ) -> None:
        """Load an adapter, or replace its version; `copies` are its tensors in host memory. On HeadwayError it has not
        changed."""
        name = update.adapter
        assert name is not None
        if name not in self._served:
            self._forget_oldest(in_use)
        slot = self._served[name].slot if name in self._served else AWAY
        if slot == AWAY and self._full(in_use):
            # Its first request brings it in.
            adapter_pairs(self._model, tensors.items(), settings.rank)
        else:
            slot = self._free_slot(in_use) if slot == AWAY else slot
            self._put(slot, tensors.items(), settings)
        self._copies[name] = (tensors if copies is None else copies, settings)
        self._copies.move_to_end(name)
        self._record(update, slot)

    def drop(self, name: str) -> None:
        if (slot := self._served[name].slot) != AWAY:
            with torch.inference_mode():
                drop_adapter(self._model, slot)
        self._remove(name)
        del self._copies[name]

    def _put(self, slot: int, tensors: Iterable[tuple[str, Tensor]], settings: LoraSettings) -> None:
        """Fill a slot; on a GPU, lay out a bank that has grown so that few products serve it."""
        with torch.inference_mode():
            load_adapter(self._model, slot, tensors, settings)
            if self._model.head_weight().is_cuda:
                join_adapters(self._model)

    def _full(self, in_use: Collection[str | None]) -> bool:
        """Tell if every slot that there may be is in use."""
        return sum(name in in_use and self.slot(name) != AWAY for name in self._served) >= self.most

    def _free_slot(self, in_use: Collection[str | None]) -> int:
        """Find a slot: a free one, a new one, or that of the adapter that was used longest ago."""
        bank = self._model.adapters
        slots = 0 if bank is None else len(bank.scales)
        taken = {adapter.slot for adapter in self._served.values()}
        if (free := next((slot for slot in range(slots) if slot not in taken), None)) is not None:
            return free
        if bank is None or self._full(in_use):
            return slots
        if slots < self.most:
            # As many again: each time graphs are captured anew.
            with torch.inference_mode():
                resize_bank(self._model, (), rank=bank.rank, slots=min(2 * slots, self.most), default=bank.default)
            return slots
        idle = next(name for name in self._copies if self.slot(name) != AWAY and name not in in_use)
        slot = self.slot(idle)
        self._move(idle, AWAY)
        return slot

    def _move(self, name: str, slot: int) -> None:
        self._served = {**self._served, name: replace(self._served[name], slot=slot)}

    def _unpacked(self, name: str) -> tuple[list[tuple[str, Tensor]], LoraSettings]:
        tensors, settings = self._copies[name]
        return list(tensors.items()), settings

    def _forget_oldest(self, in_use: Collection[str | None]) -> None:
        """Make room in host memory for one more adapter. Raises HeadwayError where all are in use."""
        if len(self._served) < self._kept:
            return
        idle = next((name for name in self._copies if name not in in_use), None)
        if idle is None:
            raise HeadwayError(f"requests use all of the {self._kept} adapters that inference.max_host_adapters allows")
        self.drop(idle)
