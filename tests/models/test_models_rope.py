"""Rotary frequencies against those of transformers."""

from typing import Any

import pytest
import torch

from headway.models.configs.config import ModelConfig
from headway.models.configs.rotary import rope_from_hf, rope_to_hf
from headway.models.layers.rope import RotaryTable, inverse_frequencies

YARN: list[dict[str, Any]] = [
    {"factor": 4.0, "original_max_position_embeddings": 64},
    {"factor": 40.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16.0},
    {"factor": 8.0, "original_max_position_embeddings": 64, "beta_slow": 2.0, "truncate": False},
    {"factor": 2.0, "original_max_position_embeddings": 128, "attention_factor": 1.3},
]


@pytest.mark.parametrize("parameters", YARN)
def test_yarn_stretches_frequencies_as_transformers_does(parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "rope_theta": 5000.0, **parameters}
    read = rope_from_hf({"rope_parameters": rope})
    config = ModelConfig("llama", 8, 64, 1, 2, 2, 32, 8, max_len=256, **read)
    theirs = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=256, rope_parameters=rope)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    torch.testing.assert_close(inverse_frequencies(config.rope), frequencies, rtol=1e-6, atol=0)
    cos, _ = RotaryTable(config.rope, 256).table(torch.device("cpu"))
    torch.testing.assert_close(cos[0], torch.full((32,), factor))
    assert rope_from_hf(rope_to_hf(config.rope, 32)) == read
