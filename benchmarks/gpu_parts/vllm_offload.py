"""vLLM's own host memory under its KV cache on one GPU: conversations of which the GPU holds a tenth take turns.

PYTHONPATH=benchmarks python -m gpu_parts.vllm_offload qwen3-0.6b
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engine_parts.work import SHAPES
from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import ModelSettings
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.engine import Engine
from headway.inference.serve import load_engine
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.costs import kv_bytes_per_token

CONVERSATIONS, TURNS, ASKED, SAID, AT_ONCE = 80, 6, 240, 16, 8
LENGTH = TURNS * (ASKED + SAID)


def measure(shape: str) -> dict[str, Any]:
    """With host memory and without: tokens prefilled, and how far the first token's logprobs of all turns differ."""
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(build_model(SHAPES[shape], device="cuda", dtype=torch.bfloat16, seed=2), Path(folder))
        torch.cuda.empty_cache()
        conversation = LENGTH * kv_bytes_per_token(SHAPES[shape], 2) / 1e9
        room = CONVERSATIONS * conversation * 1.2
        without, beside = (asyncio.run(_play(Path(folder), conversation, host)) for host in (0.0, room))
    pairs = zip(without.pop("first"), beside.pop("first"), strict=True)
    same = [abs(a[1] - b[1]) for a, b in pairs if a[0] == b[0]]
    return {
        "without": without,
        "host_memory": beside,
        "prefilled_times_less": without["prefilled"] / beside["prefilled"],
        "equal_first_tokens": len(same) / (CONVERSATIONS * TURNS),
        "largest_logprob_difference": max(same),
    }


async def _play(folder: Path, conversation: float, host: float) -> dict[str, Any]:
    settings = ServeSettings(
        model=ModelSettings(path=str(folder), dtype="bfloat16"),
        inference=InferenceSettings(
            engine="vllm", max_running=AT_ONCE, kv_memory_gb=CONVERSATIONS / 10 * conversation, kv_host_memory_gb=host,
            vllm={"attention_config": {"backend": "FLASH_ATTN"}, "enforce_eager": True},
        ),
        seq_len=LENGTH + ASKED,
    )  # fmt: skip
    engine = await asyncio.to_thread(load_engine, settings, folder)
    await engine.start()
    try:
        return await _turns(engine)
    finally:
        await engine.close()


async def _turns(engine: Engine) -> dict[str, Any]:
    """What is said does not depend on replies, so that both runs have the same conversations."""
    draw = random.Random(0)
    histories: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    params = SamplingParams(max_tokens=SAID, temperature=0.0, ignore_eos=True)
    prefilled, first, started = 0, [], time.perf_counter()
    for _ in range(TURNS):
        for begin in range(0, CONVERSATIONS, AT_ONCE):
            batch = histories[begin : begin + AT_ONCE]
            for history in batch:
                history += [draw.randrange(100_000) for _ in range(ASKED)]
            asked = (engine.generate(GenerateRequest(list(history), sampling_params=params)) for history in batch)
            for history, result in zip(batch, await asyncio.gather(*asked), strict=True):
                prefilled += len(history) - result.cached_tokens
                first.append((result.choices[0].token_ids[0], result.choices[0].logprobs[0]))
    return {"prefilled": prefilled, "seconds": time.perf_counter() - started, "first": first}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1]), indent=2))
