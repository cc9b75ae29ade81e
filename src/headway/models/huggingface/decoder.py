"""A model that is Hugging Face's own module: its parameters have that module's names."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from headway.base.errors import UsageError
from headway.models.configs.transformers import TransformersConfig
from headway.models.decoder import DecoderLM
from headway.models.huggingface.configs import hf_module
from headway.models.huggingface.linear import ModuleLinear, SharedPass, replace_linears
from headway.models.huggingface.reference import check_against_reference
from headway.models.layers.block import RunBlock
from headway.models.packed import ModelOutput, PackedTokens


class TransformersLM(DecoderLM):
    """The parts of the module are this one's, without a head that repeats the embedding. Linear layers of its blocks
    are replaced by ours, which take adapters.

    The first pass is compared with the module's own over single samples (`check_against_reference`).
    """

    def __init__(self, config: TransformersConfig) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.adapters = None
        self.rotary = []
        self._shared = SharedPass()
        module = hf_module(config.hf)
        _check_weights(module)
        head = module.get_output_embeddings()
        # Padding is a token like others here, and often the one that ends a text.
        module.get_input_embeddings().padding_idx = None
        for name, child in module.named_children():
            if child is not head or not config.tied:
                self.add_module(name, child)
        # In tuples, which nn.Module does not look into: these are parts of what was added.
        self._decoder = (module.base_model, module.get_input_embeddings(), head)
        self._blocks = _blocks_of(module, config.layers)
        for block in self._blocks:
            replace_linears(block, self._shared)
        self._unchecked: tuple[Any, ...] = (module,)
        self._logit_scale = float(getattr(module.config, "logit_scale", None) or 1.0)
        self._logit_scale /= float(getattr(module.config, "logits_scaling", None) or 1.0)
        self.train()

    @property
    def layers(self) -> nn.ModuleList:
        return self._blocks

    @property
    def stream_modules(self) -> list[nn.Module]:
        base, embedding, _ = self._decoder
        return [embedding, *self._blocks, base]

    def forward(self, tokens: PackedTokens) -> ModelOutput:
        if self._unchecked:
            (module,), self._unchecked = self._unchecked, ()
            check_against_reference(self, module, self._precision)
        device = tokens.token_ids_T.device
        self._shared.adapter_gate = None if self.adapters is None else self.adapters.gate(tokens.adapters_T, device)
        base = self._decoder[0]
        with self._precision(device):
            out = base(
                input_ids=tokens.token_ids_T[None],
                position_ids=tokens.positions_T[None],
                use_cache=False,
                attention_plan=tokens.plan,
            )
        hidden_TD: Tensor = out.last_hidden_state[0]
        hidden_TD = hidden_TD if self._shared.compute_dtype is None else hidden_TD.to(self._shared.compute_dtype)
        # The head is linear, so what scales its logits may as well scale what goes in.
        return ModelOutput(hidden_TD if self._logit_scale == 1 else hidden_TD * self._logit_scale)

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """Inside, modules of transformers compute in another precision than their weights', where one was asked for."""
        dtype = self._shared.compute_dtype
        return nullcontext() if dtype in (None, torch.float32) else torch.autocast(device.type, dtype)

    def head_weight(self) -> Tensor:
        _, embedding, head = self._decoder
        weight: Tensor = embedding.weight if self.config.tied else head.weight
        return weight

    def compute_in(self, dtype: torch.dtype | None) -> None:
        self._shared.compute_dtype = dtype

    def recompute_blocks(self, recompute: Callable[[int], RunBlock | None]) -> None:
        """Recompute all activations of all blocks, by torch's checkpointing, if any are to be recomputed."""
        if any(recompute(layer) is not None for layer in range(self.config.layers)):
            self._unchecked[0].gradient_checkpointing_enable({"use_reentrant": False})

    def train(self, mode: bool = True) -> Self:
        """Tell only blocks, which recompute, and adapters that they train: routers of some models would draw at random
        then, and logprobs be others than the engine's."""
        super().train(mode)
        for module in self.modules():
            if module is not self and not isinstance(module, GradientCheckpointingLayer | ModuleLinear):
                module.training = False
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep the values of buffers, such as rotary frequencies, where memory is given to an unset model."""
        kept = {name: buffer.clone() for name, buffer in self.named_buffers()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types here
        with torch.no_grad():
            for name, buffer in self.named_buffers():
                buffer.copy_(kept[name])
        return self


def _check_weights(module: Any) -> None:
    """Raise UsageError for weights that have no place in a stream of parameters, or in our head."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if buffers := sorted(set(module.state_dict()) - parameters):
        raise UsageError(
            f"{type(module).__name__} keeps weights in buffers, which are not trained or sent: {buffers[:3]}"
        )
    if getattr(module.get_output_embeddings(), "bias", None) is not None:
        raise UsageError(f"the head of {type(module).__name__} has a bias, which is not supported")


def _blocks_of(module: Any, layers: int) -> nn.ModuleList:
    for part in module.get_decoder().children():
        if isinstance(part, nn.ModuleList) and len(part) == layers:
            return part
    raise UsageError(f"{type(module).__name__} has no list of {layers} layers")
