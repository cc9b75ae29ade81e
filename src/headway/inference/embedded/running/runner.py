"""The runner: pack a step's tokens, run the model over the paged cache, compute logits."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.attention.paged import PagedPlan, run_whole
from headway.inference.embedded.cache.dense_cache import DenseCache
from headway.inference.embedded.cache.experts import RecordedExperts
from headway.inference.embedded.cache.states import StateStore, StepStates
from headway.inference.embedded.cache.store import KvStore
from headway.inference.embedded.cpu.decoder import CpuDecoder
from headway.inference.embedded.device.copies import to_device
from headway.inference.embedded.inputs.input_batch import InputBatch
from headway.inference.embedded.inputs.layout import StepLayout
from headway.inference.embedded.inputs.packing import Packer
from headway.inference.embedded.running.images import StepImages
from headway.inference.embedded.sampling.drawer import Drawer, HostTokens, PendingTokens
from headway.inference.embedded.sampling.sampler import top_logprobs
from headway.inference.embedded.scheduling.scheduler import Step
from headway.inference.embedded.scheduling.sequence import Sequence
from headway.models.decoder import DecoderLM
from headway.models.packed import PackedTokens
from headway.models.serving import fuse_projections
from headway.models.vision.decoder import VisionLM

Ints = NDArray[np.int64]


class Runner:
    """The model and its KV store: one forward pass per step, over one flat axis of tokens.

    With `ahead`, a step may start before the host knows the tokens of the last one.
    """

    depth = 0
    """The best number of steps in flight."""
    most_repeats = 1
    """Most times that a step is run before the host sees its tokens."""

    def __init__(
        self,
        model: DecoderLM,
        store: KvStore,
        rows: InputBatch,
        *,
        ahead: bool = False,
        states: StateStore | None = None,
    ) -> None:
        self.model = model
        self.store = store
        self.states = states
        self.rows = rows
        self.device = next(model.parameters()).device
        config = model.config
        fuse_projections(model)
        kv_heads = next((cache.kv_heads for cache in store.caches if cache.kv_heads), config.heads)
        self._heads_per_kv = config.heads // kv_heads
        self._packer = Packer(rows)
        self._drawer = self._make_drawer(ahead)
        # Layers with sparse attention would have to write to it in steps in which they do not read it. And a copy of
        # what is in FP8 would be wider than that, or wrong.
        dense = self.device.type == "cpu" and store.bytes > 0 and not store.sparse and not store.fp8
        self.dense_cache = DenseCache(store, len(rows.blocks), store.bytes) if dense else None
        keys, values = ([heads.numbers for heads in each] for each in (store.keys, store.values))
        self._whole = CpuDecoder(model, keys, values, store.block_size, rows.blocks)
        self.images = StepImages(model, len(rows.blocks)) if isinstance(model, VisionLM) else None
        slots = store.num_blocks * store.block_size
        self._experts = RecordedExperts(config, slots, self.device) if config.experts else None

    def enter(self, sequence: Sequence, adapter: int) -> None:
        """Start a sequence in its row, with the slot of its adapter (-1 for none)."""
        self.rows.enter(sequence, adapter)
        if self.images is not None:
            self.images.enter(sequence)
        if self.dense_cache is not None:
            self.dense_cache.enter(sequence.row)
        if self.states is not None:
            self.states.enter(sequence.row, sequence.snapshot)

    def run(self, step: Step, *, again: bool = False) -> tuple[Tensor, Ints, Ints, Ints]:
        """Run a step, or repeat it with the tokens just sampled. Return logits (N, vocab) of the N sequences that get a
        token, their indices in the step, their rows, and the positions of the new tokens.

        Prompt logprobs are added to the sequences that want them.
        """
        packed = self._packer.again() if again else self._packer.pack(step)
        logits = self._logits(step, packed.tokens, packed.layout, packed.drawing)
        if self.states is not None and step.saved:
            self.states.copy(step.saved)
        return logits, packed.drawing, packed.which, packed.positions

    def draw(self, logits_NV: Tensor, which: Ints, positions: Ints) -> PendingTokens | HostTokens:
        """Sample one token for each row that `run` returned."""
        return self._drawer.draw(logits_NV, which, positions)

    def read_experts(self, sequences: list[Sequence], *, computed: bool) -> None:
        """Give sequences of models with experts those of their tokens (tokens, layers, k), from `experts_start` on and
        without the last. `computed`: no step in flight computes one of these."""
        if self._experts is None or not sequences:
            return
        slots = [self._recorded_slots(sequence) for sequence in sequences]
        for sequence, experts in zip(sequences, self._experts.read(slots, computed=computed), strict=True):
            sequence.experts = experts

    @property
    def recorded(self) -> list[Tensor]:
        """Records of tokens beside their KV, one row per slot: routed experts."""
        return [] if self._experts is None else [self._experts.rows]

    def _recorded_slots(self, sequence: Sequence) -> Ints:
        places = np.arange(sequence.experts_start, min(sequence.computed, len(sequence) - 1))
        size, blocks = self.store.block_size, np.array(sequence.blocks, dtype=np.int64)
        slots: Ints = blocks[places // size] * size + places % size
        return slots

    def _make_drawer(self, ahead: bool) -> Drawer:
        return Drawer(self.rows, self.device, keep=ahead, kernels=False)

    def _logits(self, step: Step, tokens: list[int], layout: StepLayout, drawing: Ints) -> Tensor:
        """Compute logits of the last tokens of the sequences at `drawing`."""
        ends = np.cumsum(layout.counts)
        scored = bool(self.rows.scored[layout.rows].any())
        everyone = scored or len(drawing) == len(tokens)
        hidden = self._run_whole(tokens, layout, None if everyone else ends[drawing] - 1)
        if hidden is None:
            hidden = self._forward(tokens, layout)
        if scored:
            self._score_prompts(step, hidden, ends)
        if len(drawing) < len(hidden):
            hidden = hidden[self._to_device(ends[drawing] - 1)]
        return self._whole.logits(hidden) if self._whole.takes(len(hidden)) else self.model.logits(hidden)

    def _run_whole(self, tokens: list[int], layout: StepLayout, wanted: Ints | None) -> Tensor | None:
        """Hidden states of the tokens `wanted`, or all, where one call can do the whole pass."""
        if not self._whole.takes(len(tokens)) or (self.rows.adapter[layout.rows] >= 0).any():
            return None
        if self.images is not None and self.images.has_images(layout):
            return None
        return run_whole(self._whole, self._known(tokens, layout), layout, wanted)

    def _known(self, tokens: list[int], layout: StepLayout) -> list[int]:
        """Fill in tokens of the last step that were not collected yet."""
        if self._drawer.last is None or min(tokens) >= 0:
            return tokens
        last = self._drawer.last.tolist()
        rows_T = np.repeat(layout.rows, layout.counts).tolist()
        return [last[row] if token < 0 else token for token, row in zip(tokens, rows_T, strict=True)]

    def _forward(self, tokens: list[int], layout: StepLayout) -> Tensor:
        adapters = self.rows.adapter[layout.rows]
        adapted = bool((adapters >= 0).any())
        plan = self._plan(layout)
        packed = PackedTokens(
            torch.tensor(self._known(tokens, layout), device=self.device),
            self._to_device(layout.positions_T),
            plan,
            adapters_T=self._to_device(np.repeat(adapters, layout.counts)) if adapted else None,
        )
        if self.images is not None and self.images.has_images(layout):
            packed.images = self.images.inputs(layout)
        out = self.model(packed)
        if self._experts is not None and out.routed_experts_TLk is not None:
            self._experts.write(plan.slots_T, out.routed_experts_TLk)
        hidden: Tensor = out.hidden_TD
        return hidden

    def _plan(self, layout: StepLayout) -> PagedPlan:
        states = None
        if self.states is not None:
            states = StepStates(self.states, to_device(layout.rows, self.device), layout.counts.tolist())
        return PagedPlan(self.store, layout, self._heads_per_kv, self.dense_cache, states)

    def _score_prompts(self, step: Step, hidden: Tensor, ends: Ints) -> None:
        """Add prompt logprobs, each from the row before its token; after a preemption, only the missing ones."""
        for sequence, count, end in zip(step.sequences, step.counts, ends.tolist(), strict=True):
            known = len(sequence.prompt_logprobs)
            first = max(sequence.computed, known)
            last = min(sequence.computed + count, sequence.prompt_len - 1)
            if sequence.params.prompt_logprobs is None or first >= last:
                continue
            offset = end - count - sequence.computed
            logprobs = torch.log_softmax(self.model.logits(hidden[offset + first : offset + last]), dim=-1)
            targets = sequence.tokens[first + 1 : last + 1]
            own = logprobs.gather(1, torch.tensor(targets, device=self.device)[:, None])[:, 0].tolist()
            most = sequence.params.prompt_logprobs
            top = top_logprobs(logprobs, np.full(len(targets), most)) if most else [[] for _ in targets]
            sequence.prompt_logprobs.extend(
                [(token, value), *others] for token, value, others in zip(targets, own, top, strict=True)
            )

    def _to_device(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)
