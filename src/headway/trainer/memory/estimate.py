"""Estimate the device memory of a training step from the model's config and the settings alone. Without torch.

A step is a few phases whose tensors are known by name and size; its peak is that of the largest phase. The formulas
were checked against what steps on one H200 held (tests/trainer/test_memory_estimate.py).
"""

from dataclasses import dataclass

from headway.config.optimizers import AdamW, CustomOptimizer, Muon, Optimizer, Sgd
from headway.config.trainer import TrainSettings
from headway.models.configs.config import ModelConfig
from headway.models.costs import (
    adapter_count,
    block_shapes,
    image_numbers,
    kept_numbers,
    tower_weights,
    working_numbers,
)
from headway.models.registry import find_family
from headway.trainer.parallel.dims import ParallelDims
from headway.trainer.parallel.layout import Layout

FLOAT32 = 4
FRAGMENTS = 0.13
"""Memory that the allocator holds beyond what is allocated, as a share: 3 to 28 % were seen, over expert ranks 39 %."""
MLP_ROWS = 16_384
"""Rows that a recomputed block's MLP goes through at a time."""


def compute_bytes(dtype: str) -> int:
    """Bytes of a number in the precision of computation, on a GPU."""
    return FLOAT32 if dtype == "float32" else 2


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one rank at the peak of a step, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    working_copy: int
    """Weights in the precision of computation, as far as they exist at once: cast, or gathered from other ranks."""
    activations: int
    head: int

    @property
    def allocated(self) -> int:
        return sum(vars(self).values())

    @property
    def fragments(self) -> int:
        return int(FRAGMENTS * self.allocated)

    @property
    def held(self) -> int:
        """Bytes that the allocator holds."""
        return self.allocated + self.fragments

    def parts(self) -> dict[str, int]:
        named = {name.replace("_", " "): size for name, size in vars(self).items()}
        return named | {"fragments": self.fragments}


def step_memory(settings: TrainSettings, config: ModelConfig, *, accumulates: bool = True) -> StepMemory:
    """Estimate one rank's step on micro-batches of `seq_len` tokens.

    `accumulates`: a step has several of them, so that gradients of the first lie beside the activations of the second.
    Of a model that sees, all tokens are taken for those of images: nobody knows how many there will be.
    """
    sizes = _Sizes(settings, config)
    gradients = sizes.gradients if accumulates else 0
    phases = [
        # The tower's forward pass, before anything else.
        (sizes.images + sizes.tower_work, gradients, 0),
        # The head's backward pass: all activations are kept, and the first gradients come to be.
        (sizes.images + sizes.kept + sizes.hidden, gradients, sizes.head_work),
        # The last block's backward pass.
        (sizes.images + sizes.kept + sizes.block_work, gradients or sizes.head_gradient, 0),
        # The first block's: nothing else is kept any more, and all gradients are there.
        (sizes.images + sizes.block_work, sizes.gradients + sizes.head_gradient, 0),
    ]
    if sizes.trains_tower:
        # The tower's backward pass is the last.
        phases.append((sizes.images + 2 * sizes.tower_work, sizes.gradients + sizes.head_gradient, 0))
    activations, gradients, head = max(phases, key=sum)
    return StepMemory(sizes.weights, gradients, sizes.optimizer, sizes.working_copy, activations, head)


def state_numbers(optimizer: Optimizer) -> int:
    """Numbers that the optimizer keeps per weight."""
    match optimizer:
        # Muon keeps two for embeddings and head, one for the rest; a rule of the user's is taken to be like AdamW.
        case AdamW() | Muon() | CustomOptimizer():
            return 2
        case Sgd(momentum=momentum):
            return int(momentum > 0)
    return 0


class _Sizes:
    """Bytes of the tensors of a step."""

    def __init__(self, settings: TrainSettings, config: ModelConfig) -> None:
        self._settings, self._config = settings, config
        self._trainer, self._lora = settings.trainer, settings.model.lora
        self._number = compute_bytes(settings.model.dtype)
        parallel = settings.trainer.parallel
        self._copy = settings.shard_ranks * parallel.context
        self._tokens = -(-settings.seq_len // parallel.context)
        self._blocks = block_shapes(config)
        self._table = config.vocab_size * config.width
        self._held = Layout(config, ParallelDims.from_settings(settings)).weights_held
        self._frozen_tower = -(-tower_weights(config) // self._copy) if self._freezes_tower else 0
        self._image = image_numbers(config, settings.model.vision_tower)
        self._trained = self._held - self._frozen_tower
        if self._lora is not None:
            self._trained = adapter_count(config, self._lora) // self._copy

    @property
    def _freezes_tower(self) -> bool:
        """Under an adapter, all weights but its own are frozen."""
        return self._lora is None and self._settings.model.vision_tower == "frozen"

    @property
    def weights(self) -> int:
        frozen = FLOAT32 * self._frozen_tower if self._lora is None else self._number * self._held
        return FLOAT32 * self._trained + frozen

    @property
    def gradients(self) -> int:
        return FLOAT32 * self._trained

    @property
    def optimizer(self) -> int:
        if self._trainer.optimizer_on_cpu:
            return 0
        return state_numbers(self._trainer.optim) * FLOAT32 * self._trained

    @property
    def working_copy(self) -> int:
        blocks = [self._gathered(number) for number in range(len(self._blocks))]
        if self._settings.placement.trainer_ranks > 1:
            # Embedding and head from their first use to their last; a block while it runs, beside the one after it.
            # A trained block also has whole gradients, and a float32 copy of them on its way to the other ranks.
            tables = (1 if self._config.tied else 2) * self._number * self._table
            gradients = 0 if self._lora else (self._number + FLOAT32) * max(blocks) // self._number
            return tables + 2 * max(blocks) + gradients
        if self._lora is not None or self._number == FLOAT32:
            return 0
        # Kept activations keep what they were multiplied with, and those of a trained tower are always kept.
        tower = self._number * tower_weights(self._config) if self.trains_tower else 0
        return tower + (sum(blocks) if self._trainer.activations.checkpoint == "off" else max(blocks))

    @property
    def kept(self) -> int:
        """Activations that wait for the backward pass."""
        settings, layers = self._trainer.activations, len(self._blocks)
        with_attention = layers if settings.attention_layers is None else settings.attention_layers
        numbers = []
        for layer, block in enumerate(self._blocks):
            full = settings.checkpoint == "selective" and layer < layers - with_attention
            recompute = "full" if full else settings.checkpoint
            numbers.append(kept_numbers(self._config, block, recompute, joined=self._joins_experts))
            if settings.checkpoint == "selective" and not full and self._trainer.parallel.expert > 1:
                # Rows as they arrived at the experts here, as many as leave where the load is even.
                numbers[-1] += block.experts_per_token * self._config.width
        # Of those in CPU memory, the device has the one in use, and those that are on their way.
        here = sorted(numbers)[-OFFLOAD_BUFFERS:] if settings.offload else numbers
        return self._tokens * self._number * sum(here)

    @property
    def _joins_experts(self) -> bool:
        """Tell if experts are one operation: those of this rank alone, without adapters."""
        adapted = self._lora is not None and "experts" in self._lora.targets
        return find_family(self._config.family).plain_experts and self._trainer.parallel.expert == 1 and not adapted

    @property
    def images(self) -> int:
        """Pixels, and activations of the tower that wait for its backward pass, where all tokens are of images."""
        return self._tokens * (FLOAT32 * self._image.pixels + self._number * self._image.kept)

    @property
    def tower_work(self) -> int:
        """Tensors of one block of the tower."""
        return self._tokens * self._number * self._image.working

    @property
    def trains_tower(self) -> bool:
        return self._image.kept > 0

    @property
    def hidden(self) -> int:
        """The head's input and the gradient of it."""
        return 2 * self._tokens * self._number * self._config.width

    @property
    def block_work(self) -> int:
        """Tensors of the backward pass of one block, the largest."""
        return max(self._block_work(layer) for layer in range(len(self._blocks)))

    @property
    def head_gradient(self) -> int:
        return 0 if self._lora else FLOAT32 * self._table

    @property
    def head_work(self) -> int:
        """Logits of a chunk, beside those of the one before it; the weight, cast, and its gradient."""
        chunk, rows = self._trainer.head_chunk, self._tokens
        logits = min(rows, 2 * chunk) * self._config.vocab_size * self._number
        cast = 0 if self._lora or self._number == FLOAT32 else self._number * self._table
        return logits + cast + self.head_gradient

    def _gathered(self, layer: int) -> int:
        """A block's weights in the precision of computation, as one rank sees them."""
        block = self._blocks[layer]
        elsewhere = block.experts * block.expert_weights
        return self._number * (block.weights - elsewhere + elsewhere // self._trainer.parallel.expert)

    def _block_work(self, layer: int) -> int:
        block, recomputes = self._blocks[layer], self._trainer.activations.checkpoint != "off"
        attention, mlp, around = working_numbers(self._config, block, recomputes=recomputes)
        rows = min(self._tokens, MLP_ROWS) if recomputes and not block.experts else self._tokens
        work = max(attention * self._tokens, mlp * rows + around * self._tokens)
        if self._trainer.parallel.context > 1:
            # What attention sends to other ranks, and what comes from them.
            work += 2 * self._tokens * (2 * block.query_width + block.key_value_width)
        return self._number * work


OFFLOAD_BUFFERS = 3
"""Blocks whose offloaded activations are on the device at once: in use, leaving or coming, and one in between."""
