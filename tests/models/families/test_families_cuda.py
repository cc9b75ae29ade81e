"""Every family on CUDA: engine and trainer agree with each other, and with the CPU. Only the cases that Hugging Face's
modules run need transformers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
import torch
from engine_case import EngineCase, mismatch, mismatches, routed
from family_case import CASES, HERE, packed_logits, perturb, run_packed
from torch import Tensor

from headway.config.trainer import ActivationSettings
from headway.models.build import build_model
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.ops.attention import windowed
from headway.models.registry import config_from_hf, find_family
from headway.trainer.memory.recompute import recompute_policy

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SOFTCAPPED = "qwen3/plain, softcapped"
"""No family of the package bounds attention's scores; families outside it may."""
LENGTHS = [9, 1, 37, 4]


@cache
def config_of(name: str) -> ModelConfig:
    plain = name.partition(",")[0]
    values = {"bos_token_id": None, "eos_token_id": None, **json.loads((HERE / f"{plain}.json").read_text())}
    # Images on CUDA are compared by `benchmarks/gpu_parts/vision.py`; here models with a tower read text.
    values.pop("images", None)
    if plain.startswith("transformers/"):
        pytest.importorskip("transformers", reason="Hugging Face's modules")
        return find_family("transformers").config_from_hf(values)
    config = config_from_hf(values)
    return replace(config, softcap=2.0, logit_softcap=3.0) if name == SOFTCAPPED else config


@cache
def on_cpu(name: str) -> DecoderLM:
    """Weights in which nothing is trivial."""
    model = build_model(config_of(name))
    perturb(model)
    return model


class CudaCase:
    """The model of a case on the GPU."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype

    def fresh(self, recompute: Literal["off", "selective", "full"] = "off") -> DecoderLM:
        config, settings = config_of(self.name), ActivationSettings(checkpoint=recompute)
        policy = recompute_policy(settings, config.layers)
        model = build_model(config, device=DEVICE, dtype=self.dtype, seed=None, recompute=policy)
        model.load_state_dict(on_cpu(self.name).state_dict())
        return model

    def tokens(self, lengths: Sequence[int], seed: int = 0) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(0, config_of(self.name).vocab_size, (sum(lengths),), generator=draw)


@pytest.mark.parametrize("name", [*CASES, SOFTCAPPED])
def test_the_engine_computes_what_trainer_and_cpu_compute(name: str) -> None:
    """Prompts in chunks beside decoding, past every window; preempted sequences; prefixes from the cache; an update."""
    served = EngineCase(CudaCase(name, torch.float32))
    prompts = [served.prompt(n) for n in (1, 4, 19, 33, 45, 26)]
    results = served.generate(prompts, 24)
    assert served.engine.scheduler.preemptions > 0
    assert mismatch(served.model, prompts, results) < 1e-4
    assert mismatch(on_cpu(name), prompts, results) < 1e-4
    prompts = [[*prompts[-1][:-1], token] for token in range(3)]
    results = served.generate(prompts, 6)
    assert all(result.cached_tokens > 0 for result in results)
    assert mismatch(on_cpu(name), prompts, results) < 1e-4
    served.update(1)
    assert mismatch(served.model, prompts, served.generate(prompts, 6)) < 1e-4


@pytest.mark.parametrize("name", [*CASES, SOFTCAPPED])
def test_float32_logits_and_gradients_are_the_cpus(name: str) -> None:
    case, model = CudaCase(name, torch.float32), on_cpu(name)
    ids = case.tokens(LENGTHS)
    given = run_packed(model, ids, LENGTHS).routed_experts_TLk
    found, expected = backward(case.fresh(), ids, given), backward(model, ids, given)
    torch.testing.assert_close(found[0], expected[0], atol=1e-4, rtol=0)
    rounding = 1e-6 * max(float(grad.norm()) for grad in expected[1].values())
    assert found[1].keys() == expected[1].keys()
    for parameter, grad in expected[1].items():
        assert (found[1][parameter] - grad).norm() <= 1e-3 * grad.norm() + rounding, parameter


@pytest.mark.parametrize("name", [*CASES, SOFTCAPPED])
def test_bfloat16_logprobs_are_near_float32s(name: str) -> None:
    """In engine and trainer, in the mean over tokens: weights this large enlarge the rounding of some by far."""
    served = EngineCase(CudaCase(name, torch.bfloat16))
    prompts = [served.prompt(n) for n in (4, 19, 45)]
    results = served.generate(prompts, 12)
    assert float(mismatches(served.model, prompts, results).mean()) < 0.1
    assert float(mismatches(on_cpu(name), prompts, results).mean()) < 0.1


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", [*CASES, SOFTCAPPED])
def test_recomputed_gradients_are_near_the_usual(name: str, recompute: Literal["selective", "full"]) -> None:
    """Also where the first of all passes tries a kernel: what that saves is not the layer's."""
    windowed._is_right.cache_clear()
    case = CudaCase(name, torch.bfloat16)
    ids = case.tokens(LENGTHS)
    given = run_packed(on_cpu(name), ids, LENGTHS).routed_experts_TLk
    found, expected = backward(case.fresh(recompute), ids, given), backward(case.fresh(), ids, given)
    assert (found[0] - expected[0]).norm() <= 0.02 * expected[0].norm()
    rounding = 0.01 * max(float(grad.norm()) for grad in expected[1].values())
    for parameter, grad in expected[1].items():
        assert (found[1][parameter] - grad).norm() <= 0.05 * grad.norm() + rounding, parameter


def backward(model: DecoderLM, ids: Tensor, given: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of all parameters that have some."""
    model.zero_grad()
    logits = packed_logits(model, ids, LENGTHS, **routed(given, model))
    logits.logsumexp(-1).sum().backward()
    grads = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach().cpu(), grads
