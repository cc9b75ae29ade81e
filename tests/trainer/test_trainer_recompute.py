"""Blocks that compute their activations again: whatever they keep, however they divide the rows, the same gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_helpers import rich_batch, small_settings

from headway.models.attention import PackedPlan
from headway.models.build import init_weights
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.layers.attention import SelfAttention
from headway.models.layers.block import Block
from headway.models.layers.context import ForwardContext
from headway.models.layers.mlp import GatedMlp
from headway.models.layers.norm import RMSNorm
from headway.models.packed import PackedTokens
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.trainer.memory import recompute
from headway.trainer.memory.recompute import Recompute
from headway.trainer.parallel.ranks import joined
from headway.trainer.parallel.sharding import fill, global_norm
from headway.trainer.state import build_state
from headway.trainer.step import Stepper

LORA = {"model__lora__rank": 4, "model__lora__dropout": 0.3}


def gradients(**changes: Any) -> dict[str, torch.Tensor]:
    settings = small_settings(**changes)
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        for name, parameter in state.trained():
            if "lora_B" in name:
                draw = torch.Generator().manual_seed(len(name))
                fill(parameter, torch.randn(parameter.shape, generator=draw) * 0.05)
        batch = rich_batch(1, 1, state.config.vocab_size)
        torch.manual_seed(0)
        Stepper(settings, ranks)._accumulate(state, batch.ranks[0], batch.counts)
        return {name: p.grad for name, p in state.trained() if p.grad is not None}


@pytest.mark.parametrize(
    ("model", "layers"),
    [({}, None), ({}, 1), (LORA, None), (LORA, 1), ({"model__path": "tiny-moe"}, 1), ({"model__dtype": "bfloat16"}, 1)],
)
def test_recomputed_gradients_are_those_of_kept_activations(
    model: dict[str, Any], layers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "ROWS", 10)
    kept = gradients(**model)
    again = gradients(
        **model, trainer__activations__checkpoint="selective", trainer__activations__attention_layers=layers
    )
    assert kept.keys() == again.keys()
    tolerance = 0.02 if "model__dtype" in model else 1e-5
    for name, want in kept.items():
        assert (again[name] - want).norm() <= tolerance * want.norm() + 1e-7, name


class PostNormed(Block):
    """Norms what attention adds, as Gemma does."""

    def mixed_norm(self, mixed_TD: Tensor) -> Tensor:
        return 0.5 * mixed_TD.tanh()


class Mixed(Block):
    """Mixes tokens in a way of its own."""

    def mix(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        return super().mix(x_TD, context) + self.input_layernorm(x_TD).cumsum(0) * 0.1


@pytest.mark.parametrize("kind", [Block, PostNormed, Mixed])
@pytest.mark.parametrize("keep_attention", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_that_families_fill_in_are_recomputed(
    kind: type[Block], keep_attention: bool, dtype: torch.dtype
) -> None:
    """Windows and sinks too, whose gradients come from attention itself."""
    config = load_config(resolve_model("tiny"))

    def block(config: ModelConfig, layer: int) -> Block:
        first, second = (RMSNorm(config.width, config.norm_eps) for _ in range(2))
        attention = SelfAttention(config, layer, qk_norm=True, window=None if layer % 2 else 5, sinks=True)
        return kind(first, attention, second, GatedMlp(config.width, config.mlp_width))

    model = DecoderLM(config, block)
    init_weights(model, 0.1, seed=1)
    model.model.embed_tokens.compute_dtype = dtype
    plan = PackedPlan([9, 1, 30])
    tokens = PackedTokens(torch.arange(40), plan.positions, plan)
    found = []
    for run in (None, Recompute(keep_attention=keep_attention)):
        for each in model.layers:
            each.recompute = run  # type: ignore[assignment]  # modules have no types
        loss = model.logits(model(tokens).hidden_TD).logsumexp(-1).sum()
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    for name, want, again in zip([name for name, _ in model.named_parameters()], *found, strict=True):
        assert want.dtype == again.dtype == torch.float32 and want.any()
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        assert (again - want).norm() <= tolerance * want.norm(), name


def test_a_guarded_update_is_the_plain_one_or_none() -> None:
    """What runs on CUDA, where the host doesn't wait for the norm."""
    settings = small_settings()
    with joined(settings) as ranks:
        results = []
        for loss in (None, 1.0, float("nan")):
            state, stepper = build_state(settings, ranks), Stepper(settings, ranks)
            batch = rich_batch(1, 1, state.config.vocab_size)
            tally = stepper._accumulate(state, batch.ranks[0], batch.counts)
            before = [p.detach().clone() for _, p in state.trained()]
            if loss is None:
                stepper._update(state, tally, 1.0)
            else:
                norm = global_norm(p.grad for _, p in state.trained() if p.grad is not None)
                state.optimizer.step(1.0, stepper._guard(norm, torch.tensor(loss)))
            results.append([p.detach() - old for (_, p), old in zip(state.trained(), before, strict=True)])
        plain, guarded, broken = results
        torch.testing.assert_close(guarded, plain, rtol=1e-4, atol=1e-9)
        assert any(change.any() for change in plain) and not any(change.any() for change in broken)
