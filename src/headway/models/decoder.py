"""The decoder that all families are made of: embedding, blocks, final norm, head."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headway.models import ops
from headway.models.adapters.bank import AdapterBank
from headway.models.config import ModelConfig
from headway.models.layers.block import Block
from headway.models.layers.context import ForwardContext
from headway.models.layers.experts import expert_counts
from headway.models.layers.linear import Linear
from headway.models.layers.norm import RMSNorm
from headway.models.layers.rope import RotaryTable
from headway.models.packed import ModelOutput, PackedTokens


class Embedding(nn.Embedding):
    """Starts the stream, in `compute_dtype` or the weight's own: all later layers compute in the stream's precision."""

    compute_dtype: torch.dtype | None = None

    def forward(self, token_ids_T: Tensor) -> Tensor:
        x_TD = super().forward(token_ids_T)
        return x_TD if self.compute_dtype is None else x_TD.to(self.compute_dtype)

    def reset_parameters(self) -> None:
        """Leave the weight unset, as all layers here do. To draw it on the meta device, torch would import its
        compiler, which takes a second."""


class Decoder(nn.Module):
    """Embedding, blocks and final norm. Blocks get the stream and one shared context."""

    def __init__(self, config: ModelConfig, block: Callable[[ModelConfig, int], Block]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)

    def forward(
        self, token_ids_T: Tensor, context: ForwardContext, given_TLk: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Hidden states after the final norm, and each layer's experts (T, k). `given` are the experts to use."""
        x_TD = self.embed_tokens(token_ids_T)
        experts: list[Tensor | None] = []
        for number, layer in enumerate(self.layers):
            x_TD, experts_Tk = layer(x_TD, context, None if given_TLk is None else given_TLk[:, number])
            experts.append(experts_Tk)
        return self.norm(x_TD), experts


class DecoderLM(nn.Module):
    """A causal language model over packed tokens. Families say what a block is. Parameters have the names of Hugging
    Face's checkpoints, except that experts are stacked."""

    def __init__(self, config: ModelConfig, block: Callable[[ModelConfig, int], Block]) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, block)
        self.lm_head = None if config.tied else Linear(config.width, config.vocab_size)
        self.adapters: AdapterBank | None = None
        self.rotary = RotaryTable(config)

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks: what sharding, checkpointing and compilation wrap."""
        return self.model.layers

    def forward(self, tokens: PackedTokens) -> ModelOutput:
        cos, sin = self.rotary.gather(tokens.positions_T)
        gate = None if self.adapters is None else self.adapters.gate(tokens.adapters_T, tokens.token_ids_T.device)
        given = None if tokens.routed_experts_TLk is None else tokens.routed_experts_TLk.long()
        hidden_TD, experts = self.model(tokens.token_ids_T, ForwardContext(tokens.plan, cos, sin, gate), given)
        if not self.config.experts:
            return ModelOutput(hidden_TD)
        return ModelOutput(hidden_TD, *self._routing(experts))

    def head_weight(self) -> Tensor:
        """(vocab, width); the embedding's where tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden_ND: Tensor, out: Tensor | None = None) -> Tensor:
        """float32 (N, vocab), in `out` where that is given. A GPU adds up in float32 and does not round the sums to the
        weights' precision, unless gradients are wanted: torch has none of such a product."""
        weight_VD = self.head_weight()
        if hidden_ND.is_cuda and not torch.is_grad_enabled():
            return torch.mm(hidden_ND, weight_VD.t(), out_dtype=torch.float32, out=out)
        logits_NV = ops.linear(hidden_ND, weight_VD).float()
        return logits_NV if out is None else out.copy_(logits_NV)

    def _routing(self, experts: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Experts used (T, layers, k), -1 in dense layers, and tokens per expert (layers, experts)."""
        used = next(e for e in experts if e is not None)
        absent = torch.full_like(used, -1)
        by_layer = [absent if e is None else e for e in experts]
        load = [expert_counts(e.flatten(), self.config.experts) for e in by_layer]
        return torch.stack(by_layer, 1), torch.stack(load)
