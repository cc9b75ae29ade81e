"""The decoder that all families are made of: embedding, blocks, final norm, head."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from headway.models import ops
from headway.models.adapter_rows.bank import AdapterBank
from headway.models.adapter_rows.blocks import AdapterGate
from headway.models.configs.config import ModelConfig
from headway.models.configs.rotary import RopeParameters
from headway.models.layers.apart import split_context
from headway.models.layers.block import Block, RunBlock
from headway.models.layers.context import ForwardContext
from headway.models.layers.linear import Linear
from headway.models.layers.norm import RMSNorm
from headway.models.layers.rope import Rotary, RotaryTable
from headway.models.layers.sent import SentParameters
from headway.models.packed import ModelOutput, PackedTokens


class Embedding(nn.Embedding):
    """Starts the stream, in `compute_dtype` or the weight's own: all later layers compute in the stream's precision.
    Every number is multiplied by `scale`."""

    compute_dtype: torch.dtype | None = None

    def __init__(self, vocab_size: int, width: int, scale: float = 1.0) -> None:
        super().__init__(vocab_size, width)
        self.scale = scale

    def forward(self, token_ids_T: Tensor) -> Tensor:
        x_TD = super().forward(token_ids_T)
        x_TD = x_TD if self.compute_dtype is None else x_TD.to(self.compute_dtype)
        return x_TD if self.scale == 1 else x_TD * torch.tensor(self.scale, dtype=x_TD.dtype)

    def reset_parameters(self) -> None:
        """Leave the weight unset, as all layers here do. To draw it on the meta device, torch would import its
        compiler, which takes a second."""


class Decoder(nn.Module):
    """Embedding, blocks and final norm. Blocks get the stream and one shared context."""

    def __init__(self, config: ModelConfig, block: Callable[[ModelConfig, int], Block], norm: type[RMSNorm]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.width, config.embedding_scale)
        self.layers = nn.ModuleList(block(config, layer) for layer in range(config.layers))
        self.norm = norm(config.width, config.norm_eps)

    def forward(
        self, token_ids_T: Tensor, context: ForwardContext, given_TLk: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Hidden states after the final norm, and each layer's experts (T, k). `given` are the experts to use."""
        x_TD = self.embed_tokens(token_ids_T)
        experts: list[Tensor | None] = []
        for number, (layer, next_norm) in enumerate(zip(self.layers, self._next_norms(), strict=True)):
            context.next_norm = next_norm
            x_TD, experts_Tk = layer(x_TD, context, None if given_TLk is None else given_TLk[:, number])
            experts.append(experts_Tk)
        if context.parts:
            return torch.cat([self.norm(part) for part in torch.split(x_TD, context.part_sizes)]), experts
        return context.normed(x_TD, self.norm), experts

    def _next_norms(self) -> list[RMSNorm | None]:
        """For each block the norm with which what comes after it begins. In serving passes alone: where weights are
        sharded, those of the next block are not there yet."""
        if not torch.is_inference_mode_enabled():
            return [None] * len(self.layers)
        return [*(layer.first_norm for layer in self.layers[1:] if isinstance(layer, Block)), self.norm]


class DecoderLM(nn.Module):
    """A causal language model over packed tokens. Families say what a block is, of which class the final norm is, and
    which rotary positions layers choose from (None: those of the config alone). Parameters have the names of Hugging
    Face's checkpoints, except that experts are stacked."""

    def __init__(
        self,
        config: ModelConfig,
        block: Callable[[ModelConfig, int], Block],
        *,
        norm: type[RMSNorm] = RMSNorm,
        ropes: Sequence[RopeParameters] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, block, norm)
        self.lm_head = None if config.tied else Linear(config.width, config.vocab_size)
        self.adapters: AdapterBank | None = None
        self.rotary = [RotaryTable(rope, config.max_len) for rope in ((config.rope,) if ropes is None else ropes)]

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks: what sharding, checkpointing and compilation wrap."""
        return self.model.layers

    @property
    def stream_modules(self) -> list[nn.Module]:
        """The modules that make the stream: the embedding, each block, and the final norm or what ends with it."""
        return [self.model.embed_tokens, *self.model.layers, self.model.norm]

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Compute in another precision than that of the weights, which None stands for."""
        for module in self.modules():
            if isinstance(module, Embedding | SentParameters):
                module.compute_dtype = dtype

    def recompute_blocks(self, recompute: Callable[[int], RunBlock | None]) -> None:
        """Run each block as `recompute` says for its number; None: its activations are kept."""
        for layer, block in enumerate(self.layers):
            assert isinstance(block, Block)
            block.recompute = recompute(layer)

    def forward(self, tokens: PackedTokens) -> ModelOutput:
        rotary = self.rotary_at(tokens)
        given = None if tokens.routed_experts_TLk is None else tokens.routed_experts_TLk.long()
        context = ForwardContext(tokens.plan, rotary, self._gate(tokens), tokens.chosen_positions)
        blocks = tokens.adapter_blocks
        if blocks is not None and blocks.apart and blocks.only is None:
            context.parts = split_context(context, blocks)
        hidden_TD, experts = self.run_layers(tokens, context, given)
        output = ModelOutput(hidden_TD)
        if self.config.experts:
            output = ModelOutput(hidden_TD, self._routing(experts), self.config.experts)
        if context.chosen_positions:
            output.chosen_positions = {n: at for n, at in context.chosen_positions.items() if at is not None}
        return output

    def rotary_at(self, tokens: PackedTokens) -> list[Rotary]:
        """The rotary positions of the tokens, one for each of the family's `ropes`."""
        return [table.gather(tokens.positions_T) for table in self.rotary]

    def run_layers(
        self, tokens: PackedTokens, context: ForwardContext, given_TLk: Tensor | None
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Hidden states after the final norm, and each layer's experts, as `Decoder.forward` returns them."""
        hidden_TD, experts = self.model(tokens.token_ids_T, context, given_TLk)
        return hidden_TD, experts

    def _gate(self, tokens: PackedTokens) -> AdapterGate:
        """Choose the adapters of a pass: those that come with the tokens, or the bank's."""
        if tokens.adapter_blocks is not None:
            return tokens.adapter_blocks
        return None if self.adapters is None else self.adapters.gate(tokens.adapters_T, tokens.token_ids_T.device)

    def head_weight(self) -> Tensor:
        """(vocab, width); the embedding's where tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden_ND: Tensor, out: Tensor | None = None) -> Tensor:
        """float32 (N, vocab), in `out` where that is given. A GPU adds up in float32 and does not round the sums to the
        weights' precision, unless gradients are wanted: torch has none of such a product."""
        weight_VD = self.head_weight()
        if hidden_ND.is_cuda and not torch.is_grad_enabled():
            logits_NV = torch.mm(hidden_ND, weight_VD.t(), out_dtype=torch.float32, out=out)
            return logits_NV if self.config.logit_softcap is None else self._capped(logits_NV, out)
        logits_NV = ops.linear(hidden_ND, weight_VD).float()
        if self.config.logit_softcap is not None:
            return self._capped(logits_NV, out)
        return logits_NV if out is None else out.copy_(logits_NV)

    def _capped(self, logits_NV: Tensor, out: Tensor | None) -> Tensor:
        cap = self.config.logit_softcap
        assert cap is not None
        capped_NV = cap * torch.tanh(logits_NV / cap)
        return capped_NV if out is None else out.copy_(capped_NV)

    def _routing(self, experts: list[Tensor | None]) -> Tensor:
        """Experts used (T, layers, k), -1 in dense layers."""
        used = next(e for e in experts if e is not None)
        absent = torch.full_like(used, -1)
        return torch.stack([absent if e is None else e for e in experts], 1)
