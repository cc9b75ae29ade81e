"""A decoder that sees: features of images stand among the embeddings of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headway.models.configs.config import ModelConfig
from headway.models.configs.rotary import RopeParameters
from headway.models.decoder import DecoderLM
from headway.models.layers.block import Block
from headway.models.layers.context import ForwardContext
from headway.models.layers.norm import RMSNorm
from headway.models.layers.rope import Rotary
from headway.models.packed import Features, ImageTokens, PackedTokens
from headway.models.vision.config import VisionConfig
from headway.models.vision.tower import VisionTower


class VisionLM(DecoderLM):
    """A causal language model over packed tokens and images. `axes` says which of a token's three positions turns each
    rotary number of a head (M-RoPE); None: positions have one axis. Passes without images know nothing of the tower."""

    def __init__(
        self,
        config: VisionConfig,
        block: Callable[[ModelConfig, int], Block],
        tower: VisionTower,
        *,
        axes: Sequence[int] | None,
        norm: type[RMSNorm] = RMSNorm,
        ropes: Sequence[RopeParameters] | None = None,
    ) -> None:
        super().__init__(config, block, norm=norm, ropes=ropes)
        self.model.visual = tower
        self.axes = None if axes is None else list(axes)

    @property
    def tower(self) -> VisionTower:
        tower = self.model.visual
        assert isinstance(tower, VisionTower)
        return tower

    def rotary_at(self, tokens: PackedTokens) -> list[Rotary]:
        if tokens.images is None or self.axes is None:
            return super().rotary_at(tokens)
        positions_3T = tokens.images.positions_3T
        assert positions_3T is not None
        axes = torch.tensor(self.axes, device=tokens.token_ids_T.device)
        return [table.gather_axes(positions_3T, axes) for table in self.rotary]

    def run_layers(
        self, tokens: PackedTokens, context: ForwardContext, given_TLk: Tensor | None
    ) -> tuple[Tensor, list[Tensor | None]]:
        if tokens.images is None:
            return super().run_layers(tokens, context, given_TLk)
        return self._run_images(tokens, context, given_TLk, tokens.images)

    def _run_images(
        self, tokens: PackedTokens, context: ForwardContext, given_TLk: Tensor | None, images: ImageTokens
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Features stand instead of the placeholders' embeddings, and deeper ones are added after the first layers."""
        x_TD = self.model.embed_tokens(tokens.token_ids_T)
        # One adapter in training; those of several requests are not told apart in images.
        gate = context.adapter_gate if isinstance(context.adapter_gate, float) else None
        if images.spans is not None:
            context = replace(context, plan=context.plan.with_spans(images.spans))
        features = images.features
        if features is None and not images.grids:  # as on a rank that has none of the images of its samples
            features = Features(x_TD.new_empty(0, x_TD.shape[1]))
        elif features is None:
            features = self.tower(images.patches_PN.to(x_TD.dtype), images.grids, gate)
        at_U, of_U = images.tokens_U, images.features_U
        x_TD = x_TD.index_copy(0, at_U, features.last_FD[of_U])
        experts: list[Tensor | None] = []
        for number, layer in enumerate(self.layers):
            x_TD, experts_Tk = layer(x_TD, context, None if given_TLk is None else given_TLk[:, number])
            experts.append(experts_Tk)
            if number < len(features.deep):
                x_TD = x_TD.index_add(0, at_U, features.deep[number][of_U])
        return self.model.norm(x_TD), experts
