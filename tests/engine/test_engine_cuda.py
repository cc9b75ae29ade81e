"""The engine on CUDA: the same logprobs as the training forward pass there."""

import pytest
import torch
from engine_common import FAMILIES, make_engine, make_model, mismatch, prompt, request, run_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_prefill_chunks_decoding_and_preemption(family: str, dtype: torch.dtype, tolerance: float) -> None:
    model = make_model(FAMILIES[family]).to("cuda", dtype)
    engine = make_engine(model, num_blocks=60, max_batched_tokens=48)
    prompts = [prompt(n) for n in (1, 5, 17, 40, 63, 33)]
    results = run_all(engine, [request(p, 40, seed=n, temperature=0.9) for n, p in enumerate(prompts)])
    assert engine.scheduler.preemptions > 0
    for tokens, result in zip(prompts, results, strict=True):
        assert len(result.choices[0].token_ids) == 40
        assert mismatch(model, tokens, result.choices[0], 0.9) < tolerance
