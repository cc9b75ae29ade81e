"""A KV cache in FP8: engines compute what the model computes with keys and values that were quantized."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_common import FAMILIES, LLAMA, QWEN3, make_engine, make_model, mismatch, prompt, request, run_all, run_one
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.config.inference import InferenceSettings, ServeSettings
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.load import load_service, size_engine
from headway.inference.outputs import Choice
from headway.models.attention import PackedPlan
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.ops import registry
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.ops.fp8.blocks import quantize_vectors
from headway.models.packed import PackedTokens

WINDOWED = replace(QWEN3, family="mistral", window=8, window_layers=(0, 1))


@pytest.fixture(autouse=True, params=["compiled", "plain"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """C kernels, where they are on, leave this cache to plain torch."""
    if request.param == "compiled":
        assert registry.enable("c"), "these tests need a C compiler"
    yield
    registry.disable("c")


class QuantizingPlan(PackedPlan):
    """Attention of the trainer, of keys and values as the cache keeps them."""

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer) -> Tensor:
        return super().attend(q_THD, kept(k_TKD), kept(v_TKD), layer)


def kept(heads: Tensor) -> Tensor:
    values, scales = quantize_vectors(heads)
    return values.float() * scales[..., None]


def expected_logprobs(model: DecoderLM, tokens: list[int]) -> Tensor:
    ids = torch.tensor(tokens)
    with torch.no_grad():
        hidden = model(PackedTokens(ids, torch.arange(len(ids)), QuantizingPlan([len(ids)], ids.device))).hidden_TD
        return torch.log_softmax(model.logits(hidden), -1)[:-1].gather(1, ids[1:, None])[:, 0]


def apart(model: DecoderLM, prompt_ids: list[int], choice: Choice) -> float:
    """The largest difference from logprobs with quantized keys and values."""
    expected = expected_logprobs(model, prompt_ids + choice.token_ids)[len(prompt_ids) - 1 :]
    return float((expected - torch.tensor(choice.logprobs)).abs().max())


def fp8_engine(model: DecoderLM, **limits: int) -> EmbeddedEngine:
    return make_engine(model, kv_fp8=True, **limits)


@pytest.mark.parametrize("config", [*FAMILIES.values(), WINDOWED], ids=lambda config: config.family)
def test_logprobs_are_those_of_quantized_keys_and_values(config: ModelConfig) -> None:
    """Of prompts that come in chunks beside others that decode, too."""
    model = make_model(config)
    prompts = [prompt(n) for n in (1, 5, 17, 70)]
    results = run_all(fp8_engine(model, max_batched_tokens=16), [request(p, 20) for p in prompts])
    choices = [result.choices[0] for result in results]
    for tokens, choice in zip(prompts, choices, strict=True):
        assert apart(model, tokens, choice) < 1e-4
    assert max(mismatch(model, *pair) for pair in zip(prompts, choices, strict=True)) > 1e-3, "nothing was quantized"


def test_cached_prefixes_are_quantized_once() -> None:
    model = make_model()
    engine = fp8_engine(model)
    shared = prompt(30)
    run_one(engine, [*shared, 1, 2])
    for n, result in enumerate(run_all(engine, [request([*shared, n], 15) for n in range(5)])):
        assert result.cached_tokens == 28
        assert apart(model, [*shared, n], result.choices[0]) < 1e-4


def test_blocks_come_back_from_host_memory_with_their_scales() -> None:
    model = make_model()
    engine = fp8_engine(model, num_blocks=40, max_running=2)
    engine.add_host_tier(200, None)
    prompts = [prompt(60, seed=n) for n in range(4)]
    for _ in range(2):
        results = [run_all(engine, [request(tokens, 6)])[0] for tokens in prompts]
    for tokens, result in zip(prompts, results, strict=True):
        assert result.cached_tokens == 56
        assert apart(model, tokens, result.choices[0]) < 1e-4


def test_more_tokens_fit_and_names_of_blocks_differ() -> None:
    settings = {kind: InferenceSettings(kv_memory_gb=1e-4, kv_dtype=kind) for kind in ("auto", "fp8")}
    fits = {kind: size_engine(each, LLAMA, 64, torch.bfloat16, 0).num_blocks for kind, each in settings.items()}
    # Heads of 8 numbers: 8 bytes and a scale of 4 beside 16.
    assert fits["fp8"] / fits["auto"] == pytest.approx(16 / 12, rel=0.05)
    plain, fp8 = make_engine(make_model()), fp8_engine(make_model())
    assert fp8.runner.store.bytes == plain.runner.store.bytes * 12 / 32
    for engine in (plain, fp8):
        engine.roots.fingerprint = "weights"
    assert plain.root_of(None, None) != fp8.root_of(None, None)


def test_a_model_whose_cache_is_latent_is_refused(tmp_path: Path) -> None:
    families = Path(__file__).parents[1] / "models" / "families"
    shutil.copy(families / "deepseek_v3" / "groups.json", tmp_path / "config.json")
    settings = ServeSettings.model_validate({"inference": {"kv_dtype": "fp8"}})
    with pytest.raises(HeadwayError, match=r'family deepseek_v3.*set it to "auto"'):
        load_service(settings, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_serve_from_an_fp8_cache(dtype: torch.dtype) -> None:
    """Prompts in chunks, captured steps, and sequences that come while others decode."""
    config = replace(QWEN3, width=256, heads=8, kv_heads=2, head_dim=64)
    model, on_cpu = make_model(config).to("cuda", dtype), make_model(config)
    on_cpu.load_state_dict({name: tensor.float().cpu() for name, tensor in model.state_dict().items()})
    engine = fp8_engine(model, max_batched_tokens=48)
    assert engine.runner.graphs.enabled and engine.runner.store.fp8
    prompts = [prompt(n) for n in (1, 17, 40, 90)]
    results = run_all(engine, [request(p, 20) for p in prompts])
    for tokens, result in zip(prompts, results, strict=True):
        assert apart(on_cpu, tokens, result.choices[0]) < (1e-2 if dtype is torch.float32 else 0.5)
