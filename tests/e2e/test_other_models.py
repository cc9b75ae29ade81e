"""`headway rl` with models that are not built in: one that Hugging Face's code runs, and one with latent attention."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_runs import Run, headway

from headway.core.runs import RunPaths
from headway.models.checkpoints.folders import copy_companions, read_tensors
from headway.models.tiny import resolve_model

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
PHI3 = {"model_type": "phi3", "num_key_value_heads": 2, "sliding_window": 16} | SHAPE
COHERE = {"model_type": "cohere", "num_key_value_heads": 2} | SHAPE
LATENT = SHAPE | {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "v_head_dim": 14,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4,
    "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 1, "topk_group": 2,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
LORA = ("--model.lora.rank", "4")


def random_checkpoint(values: dict[str, Any], folder: Path) -> Path:
    """A model of transformers with random weights, and the tokenizer of the built-in ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = resolve_model("tiny")
    known = json.loads((tiny / "config.json").read_text())
    shared = {name: known[name] for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(**values, **shared, max_position_embeddings=256, bos_token_id=None)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    copy_companions(tiny, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "flags"),
    [
        pytest.param(PHI3, ("--model.implementation", "transformers"), id="phi3"),
        pytest.param(COHERE, ("--model.implementation", "transformers", *LORA), id="cohere-lora"),
        pytest.param(LATENT, (), id="latent"),
        pytest.param(LATENT, LORA, id="latent-lora"),
    ],
)
def test_a_run_trains_and_serves_it(values: dict[str, Any], flags: tuple[str, ...], tmp_path: Path) -> None:
    """The engine's logprobs are the trainer's, after updates, too, and the export loads in transformers."""
    from transformers import AutoModelForCausalLM

    folder = random_checkpoint(values, tmp_path / "model")
    env = [{"id": "reverse-text", "workers": {"max": 1}}]
    headway(
        *("rl", "--model.path", str(folder), *flags, "--placement.device", "cpu", "--seq_len", "128"),
        *("--max_steps", "3", "--trainer.optim.lr", "1e-2", "--orchestrator.envs", json.dumps(env)),
        *("--orchestrator.max_lag", "0", "--orchestrator.batch_size", "8", "--orchestrator.group_size", "4"),
        *("--orchestrator.filters.zero_advantage", "false", "--orchestrator.sampling.max_tokens", "12"),
        *("--run.output_dir", str(tmp_path), "--run.name", "run"),
    )
    run = Run(RunPaths(tmp_path / "run"))
    assert len(run.column("trainer", "mismatch_kl")) == 3
    assert max(run.column("trainer", "mismatch_kl")) < 1e-6
    exported = run.paths.exports / "step_000003"
    before, after = dict(read_tensors(folder)), dict(read_tensors(exported))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    AutoModelForCausalLM.from_pretrained(exported)
