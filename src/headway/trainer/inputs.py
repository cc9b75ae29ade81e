"""Conversion of a micro-batch, as it came over the wire, to checked tensors on the device."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.core.batches import COMPONENTS, ComponentCounts, MicroBatch
from headway.core.streams import streams_of
from headway.models.attention import PackedPlan
from headway.models.configs.config import ModelConfig
from headway.models.ops.experts.choices import expert_counts
from headway.models.packed import ModelOutput, PackedTokens
from headway.models.vision.config import VisionConfig
from headway.models.vision.inputs import image_tokens
from headway.models.vision.places import check_placeholders, packed_positions
from headway.trainer.losses.components import LossTokens
from headway.trainer.parallel.context import ContextGroup, ScoredShare

_DTYPES = {"float32": torch.float32, "int32": torch.int64, "bool": torch.bool}


@dataclass(slots=True)
class Scored:
    """The N tokens that any component or metric looks at; token t is predicted by the hidden state of t - 1.

    The first token of a sample has nothing before it, so it is never among them. This rank has the hidden states of M
    of them at `predictors`: of all, unless ranks share the micro-batch.
    """

    predictors_M: Tensor
    targets_M: Tensor
    temperatures_M: Tensor
    loss: LossTokens


class Inputs:
    """The model's inputs, copied to the device at once, and the scored tokens, copied when they are first asked for: by
    then the device has work. With a `context` group the model gets this rank's part of the tokens."""

    def __init__(
        self, micro: MicroBatch, config: ModelConfig, device: torch.device, context: ContextGroup | None = None
    ) -> None:
        self.lengths = micro.lengths
        self._micro, self._device = micro, device
        self._share = None if context is None else context.share(micro.lengths, config, device)
        experts = micro.routed_experts if config.experts else None
        self.tokens = PackedTokens(
            token_ids_T=self._put(self._part(micro.token_ids), torch.int64),
            positions_T=self._put(self._part(micro.positions), torch.int64),
            plan=PackedPlan(micro.lengths, device) if self._share is None else self._share.plan,
            routed_experts_TLk=None if experts is None else self._put(self._part(experts, -1), torch.int64),
        )
        if micro.images is not None and isinstance(config, VisionConfig):
            share = self._share
            lengths, rows = (micro.lengths, None) if share is None else (share.cut.padded_lengths, share.rows)
            self.tokens.images = image_tokens(micro.images, lengths, config, self._put, rows)

    @cached_property
    def scored(self) -> Scored:
        loss = LossTokens(
            sampled_N=self.scored_stream("sampled"),
            old_logprobs_N=self.scored_stream("logprobs"),
            advantages_N=self.scored_stream("advantages"),
            rl_weight_N=self.scored_stream("rl_weight"),
            ce_weight_N=self.scored_stream("ce_weight"),
            ref_kl_weight_N=self.scored_stream("ref_kl_weight"),
            ref_logprobs_N=self.scored_stream("ref_logprobs"),
            segments_N=self._put(self._segments[self._rows], torch.int64),
        )
        share = self._scored_share
        predictors = self._rows - 1 if share is None else share.predictors_M
        mine = slice(None) if share is None else share.mine_N
        return Scored(
            predictors_M=self._put(predictors, torch.int64),
            targets_M=self._put(self._micro.token_ids[self._rows[mine]], torch.int64),
            temperatures_M=self._put(self._micro.temperatures[self._rows[mine]], torch.float32),
            loss=loss,
        )

    def whole(self, values_M: Tensor) -> Tensor:
        """Return the numbers of all N scored tokens, given this rank's; the ranks that share them all call it."""
        return values_M if self._scored_share is None else self._scored_share.whole(values_M)

    def expert_load(self, output: ModelOutput) -> Tensor | None:
        """Count the tokens that each expert got here, (layers, experts), without padding."""
        load_LE, used_TLk = output.expert_load_LE, output.routed_experts_TLk
        padding = 0 if self._share is None else self._share.padding
        if load_LE is None or used_TLk is None or not padding:
            return load_LE
        filling = [expert_counts(layer.flatten(), load_LE.shape[1]) for layer in used_TLk[-padding:].unbind(1)]
        return load_LE - torch.stack(filling)

    def scored_stream(self, name: str) -> Tensor:
        """Copy a stream of the scored tokens to the device. Any stream of the table can be asked for."""
        stream_T: NDArray[np.generic] = getattr(self._micro, name)
        return self._put(stream_T[self._rows], _DTYPES[streams_of(MicroBatch)[name].dtype.name])

    @cached_property
    def real_tokens(self) -> int:
        """Tokens of samples that train anything; the rest is filling."""
        trained_S = np.bincount(self._segments[self._rows], minlength=len(self.lengths)) > 0
        return int(np.asarray(self.lengths)[trained_S].sum())

    @cached_property
    def _rows(self) -> NDArray[np.intp]:
        return np.flatnonzero(needed_tokens(self._micro))

    @cached_property
    def _scored_share(self) -> ScoredShare | None:
        return None if self._share is None else self._share.scored(self._rows)

    def _part(self, stream_T: NDArray[Any], filling: int = 0) -> NDArray[Any]:
        """This rank's part of a stream."""
        return stream_T if self._share is None else self._share.take(stream_T, filling)

    @cached_property
    def _segments(self) -> NDArray[np.intp]:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def _put(self, stream: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        tensor = torch.as_tensor(np.ascontiguousarray(stream), dtype=dtype)
        # From pinned memory, or the host would wait for what the device does before the copy.
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


def prepare(
    micro: MicroBatch, config: ModelConfig, device: torch.device, context: ContextGroup | None = None
) -> Inputs:
    """Raises HeadwayError, naming the stream, where the micro-batch contradicts itself or the model."""
    check(micro, config)
    return Inputs(micro, config, device, context)


def needed_tokens(micro: MicroBatch) -> NDArray[np.bool_]:
    """Mark the tokens that need a logprob: those that a component counts or the policy sampled, except first ones."""
    needed_T: NDArray[np.bool_] = micro.sampled | micro.counted
    needed_T[np.cumsum([0, *micro.lengths[:-1]])] = False
    return needed_T


def check(micro: MicroBatch, config: ModelConfig) -> None:
    """Raise HeadwayError where the micro-batch contradicts itself or the model."""
    if not micro.lengths or min(micro.lengths) < 1:
        raise HeadwayError(f"micro-batch: lengths must be samples of at least one token (got {micro.lengths[:8]})")
    size = sum(micro.lengths)
    for name in streams_of(MicroBatch):
        stream = getattr(micro, name)
        if stream.shape != (size,):
            raise HeadwayError(f"micro-batch: {name} has shape {stream.shape}, but lengths add up to {size} tokens")
    lowest, highest = int(micro.token_ids.min()), int(micro.token_ids.max())
    if lowest < 0 or highest >= config.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise HeadwayError(
            f"micro-batch: token_ids holds {wrong}, outside of the model's vocabulary of {config.vocab_size}; "
            "the orchestrator and the trainer must use the same model"
        )
    if max(micro.lengths) > config.max_len:
        raise HeadwayError(
            f"micro-batch: lengths holds a sample of {max(micro.lengths)} tokens; the model ends at {config.max_len}"
        )
    starts_T = np.repeat(np.cumsum([0, *micro.lengths[:-1]]), micro.lengths)
    if not np.array_equal(micro.positions, np.arange(size) - starts_T):
        raise HeadwayError("micro-batch: positions do not restart at every sample of lengths")
    if not (micro.temperatures > 0).all():
        raise HeadwayError("micro-batch: temperatures must be above 0 (greedy tokens have temperature 1)")
    _check_experts(micro, config, size)
    _check_images(micro, config, size)


def _check_experts(micro: MicroBatch, config: ModelConfig, size: int) -> None:
    experts = micro.routed_experts
    if experts is None or not config.experts:
        return
    expected = (size, config.layers, config.experts_per_token)
    if experts.shape != expected:
        raise HeadwayError(f"micro-batch: routed_experts has shape {experts.shape}, the model wants {expected}")
    if experts.max() >= config.experts or experts.min() < -1:
        raise HeadwayError(f"micro-batch: routed_experts must be -1 to {config.experts - 1}")


def _check_images(micro: MicroBatch, config: ModelConfig, size: int) -> None:
    images = micro.images
    if images is None:
        return
    if not isinstance(config, VisionConfig):
        raise HeadwayError(f"micro-batch: it has images, but models of the family {config.family!r} do not see")
    try:
        images.check(size)
        if (numbers := images.patches.shape[1]) != config.tower.patch_numbers:
            raise HeadwayError(f"images: patches of {numbers} numbers, not {config.tower.patch_numbers}")
        for grid in images.shapes:
            config.tower.check_grid(grid)
        check_placeholders(micro.token_ids, images, config.image_token, config.tower.merge)
        packed_positions(micro.lengths, images, config.tower.merge)
    except HeadwayError as error:
        raise HeadwayError(f"micro-batch: {error}") from None


def check_counts(micro_batches: list[MicroBatch], counts: ComponentCounts, step: int) -> None:
    """Check that the batch counts every component's tokens here, or the loss would be divided by too little."""
    if not micro_batches:
        raise HeadwayError(f"batch {step}: has no micro-batches for this rank")
    found = ComponentCounts.of(micro_batches)
    for name in COMPONENTS:
        here, total = getattr(found, name), getattr(counts, name)
        if here > total:
            raise HeadwayError(
                f"batch {step}: {name}_weight is not 0 on {here} tokens of this rank, but counts.{name} is {total}"
            )
