"""A forward pass over tokens that are on the device: the part that all kinds of steps there share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.inference.embedded.attention.tiles import TilePlan
from headway.inference.embedded.cache.experts import RecordedExperts
from headway.inference.embedded.cache.states import StateStore, StepStates
from headway.inference.embedded.cache.store import KvStore
from headway.models.decoder import DecoderLM
from headway.models.ops.attention.paged import Tiles
from headway.models.packed import ImageTokens, PackedTokens


class DevicePass:
    """The model and the state that outlasts a step: the table of blocks, with a row per running sequence and one for
    padding, whose block is the store's last; the experts of all slots (None where the model has none); and, owned by
    the caller, the `last` token of every row. `shift` is, by row, how far rotary positions are from places among the
    tokens: text after images, in models that see. `states` are those of recurrent layers (None where the model has
    none)."""

    def __init__(
        self,
        model: DecoderLM,
        store: KvStore,
        max_blocks: int,
        last: Tensor,
        experts: RecordedExperts | None,
        states: StateStore | None = None,
    ) -> None:
        self.model = model
        self.store = store
        self.states = states
        self.table = torch.zeros((len(last), max_blocks), dtype=torch.int32, device=last.device)
        self.table[-1] = store.num_blocks - 1
        self.shift: Tensor | None = None
        self._last = last
        self._experts = experts

    @property
    def padding_slot(self) -> int:
        return (self.store.num_blocks - 1) * self.store.block_size

    @property
    def padding_row(self) -> int:
        return len(self.table) - 1

    def states_of(self, rows: Tensor, lengths: Sequence[int]) -> StepStates | None:
        """The states of a step's sequences; those of all padding are one."""
        if self.states is None:
            return None
        return StepStates(self.states, rows.masked_fill(rows == self.padding_row, self.states.padding), lengths)

    def hidden(
        self,
        tokens_T: Tensor,
        rows_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        tiles: list[Tiles],
        *,
        adapters_T: Tensor | None = None,
        images: ImageTokens | None = None,
        padded: bool = False,
        states: StepStates | None = None,
    ) -> Tensor:
        """Compute hidden states (T, D). A token below 0 is its row's last one. `padded`: some tokens are in no tile."""
        tokens_T = torch.where(tokens_T < 0, self._last[rows_T], tokens_T)
        size = self.store.block_size
        self.table.view(-1)[rows_T * self.table.shape[1] + positions_T // size] = (slots_T // size).int()
        plan = TilePlan(self.store, self.table, slots_T, tiles, padded, states)
        turned_T = positions_T if self.shift is None else positions_T + self.shift[rows_T]
        out = self.model(PackedTokens(tokens_T, turned_T, plan, adapters_T=adapters_T, images=images))
        if self._experts is not None and out.routed_experts_TLk is not None:
            self._experts.write(slots_T, out.routed_experts_TLk)
        hidden: Tensor = out.hidden_TD
        return hidden
