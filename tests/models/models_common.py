"""Small models in our code and in Hugging Face's, with equal weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.packed import ModelOutput, PackedTokens

SMALL = ModelConfig(
    family="qwen3", vocab_size=67, width=48, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_width=80,
    initializer_range=0.15, max_len=256,
)  # fmt: skip
SMALL_MOE = replace(SMALL, family="qwen3_moe", experts=5, experts_per_token=2, expert_width=24, normalize_gates=True)


def small(family: str, **changes: Any) -> ModelConfig:
    return replace(SMALL_MOE if family == "qwen3_moe" else replace(SMALL, family=family), **changes)


def perturb_norms(model: DecoderLM, seed: int = 1) -> DecoderLM:
    """Norm weights of 1 and biases of 0 would hide a missing or misplaced one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def random_model(config: ModelConfig, seed: int = 0) -> DecoderLM:
    return perturb_norms(build_model(config, seed=seed))


def random_tokens(config: ModelConfig, lengths: list[int], seed: int = 0) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


def positions_of(lengths: list[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """0 .. n-1 for each length n, end to end."""
    return torch.cat([torch.arange(n, device=device) for n in lengths])


def run_packed(model: DecoderLM, token_ids: torch.Tensor, lengths: list[int], **extra: Any) -> ModelOutput:
    tokens = PackedTokens(token_ids, positions_of(lengths), PackedPlan(lengths), **extra)
    output: ModelOutput = model(tokens)
    return output


def packed_logits(model: DecoderLM, token_ids: torch.Tensor, lengths: list[int], **extra: Any) -> torch.Tensor:
    return model.logits(run_packed(model, token_ids, lengths, **extra).hidden_TD)


def hf_model(model: DecoderLM, folder: Path) -> Any:
    """The same weights in transformers, through a checkpoint that we wrote."""
    from transformers import AutoModelForCausalLM

    save_checkpoint(model, folder)
    # Its grouped matrix products refuse odd sizes; "eager" takes one expert after the other.
    eager = {"experts_implementation": "eager"} if model.config.experts else {}
    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **eager
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return loaded.eval()


def hf_logits(reference: Any, token_ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Each sample alone."""
    return torch.cat([reference(ids[None]).logits[0] for ids in token_ids.split(lengths)])
