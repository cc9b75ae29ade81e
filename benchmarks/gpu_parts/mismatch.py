"""How far a trainer is from the engines that sample for it, with the experts they chose replayed and without.

PYTHONPATH=benchmarks python -m gpu_parts.mismatch [--layers 12] [--engines embedded vllm] [--compute dtype fp8]
PYTHONPATH=benchmarks python -m gpu_parts.mismatch --model tiny-moe --dtype float32           # on a CPU
PYTHONPATH=benchmarks python -m gpu_parts.mismatch --model SMOLLM2 --kv-dtype auto fp8   # of the KV cache

The model has the shape of Qwen3-30B-A3B. Every engine has a row with a trainer of its own precision, and an engine in
FP8 one with a trainer in `--dtype` too.
"""

import argparse
import asyncio
import json
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine_parts.work import SHAPES
from gpu_parts.families import given_experts, packed_logprobs
from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import ModelSettings
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.engine import Engine
from headway.inference.outputs import Choice
from headway.inference.serve import load_engine
from headway.models.build import build_model
from headway.models.checkpoints.folders import load_model, save_checkpoint
from headway.models.decoder import DecoderLM
from headway.models.fp8 import apply_fp8
from headway.models.tiny import resolve_model

SEQUENCES, PROMPT, OUTPUT = 64, 64, 128
Sampled = tuple[list[int], Choice]
"""A prompt, and what came after it."""


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for every engine and precision: the mean KL of sampled tokens, and the largest difference of logprobs."""
    dtype = getattr(torch, options.dtype)
    rows = []
    for engine in options.engines:
        for compute, kv_dtype in product(options.compute, options.kv_dtype):
            sampled = asyncio.run(sample(settings_of(engine, compute, kv_dtype, options, folder), folder))
            for trained in sorted({compute, "dtype"}):
                trainer = load_model(folder, device=options.device, dtype=dtype).eval()
                if trained == "fp8":
                    apply_fp8(trainer)
                row = {"engine": engine, "compute": compute, "kv_dtype": kv_dtype, "trainer": trained}
                rows.append(row | compare(trainer, sampled))
                print(json.dumps(rows[-1]), flush=True)
                del trainer
    return rows


def compare(trainer: DecoderLM, sampled: list[Sampled]) -> dict[str, float]:
    kept, anew = (gaps(trainer, sampled, replay) for replay in (True, False))
    return {
        "replayed": kl(kept),
        "anew": kl(anew),
        "ratio": kl(anew) / max(kl(kept), 1e-18),
        "largest_replayed": float(kept.abs().max()),
        "largest_anew": float(anew.abs().max()),
    }


def settings_of(engine: Any, compute: Any, kv_dtype: Any, options: argparse.Namespace, folder: Path) -> ServeSettings:
    own = {"attention_config": {"backend": "FLASH_ATTN"}, "enforce_eager": True} if options.device == "cuda" else {}
    return ServeSettings(
        model=ModelSettings(path=str(folder), dtype=options.dtype),
        inference=InferenceSettings(
            engine=engine, compute=compute, kv_dtype=kv_dtype, max_running=SEQUENCES,
            kv_memory_gb=4.0 if options.device == "cuda" else 0.5, vllm=own if engine == "vllm" else {},
        ),
        seq_len=PROMPT + OUTPUT,
    )  # fmt: skip


async def sample(settings: ServeSettings, folder: Path) -> list[Sampled]:
    engine: Engine = await asyncio.to_thread(load_engine, settings, folder)
    await engine.start()
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, seed=1)
    prompts = [[3 + (31 * i * i + 17 * j + i) % 90 for i in range(PROMPT)] for j in range(SEQUENCES)]
    try:
        asked = (engine.generate(GenerateRequest(tokens, sampling_params=params)) for tokens in prompts)
        results = await asyncio.gather(*asked)
    finally:
        await engine.close()
    return [(tokens, result.choices[0]) for tokens, result in zip(prompts, results, strict=True)]


def gaps(trainer: DecoderLM, sampled: list[Sampled], replay: bool) -> Tensor:
    """By how much the trainer's logprobs of sampled tokens exceed the engine's."""
    found = []
    for prompt, choice in sampled:
        experts = given_experts(choice) if replay else None
        ours = packed_logprobs(trainer, prompt + choice.token_ids, experts)[len(prompt) - 1 :]
        found.append(ours - torch.tensor(choice.logprobs))
    return torch.cat(found)


def kl(gaps: Tensor) -> float:
    """Estimate the engine's divergence from the trainer, as the run's metric `mismatch_kl` does."""
    return float((gaps.double().expm1() - gaps.double()).mean())


@torch.no_grad()
def spread(model: DecoderLM, std: float) -> None:
    """Fresh weights (0.02) route nearly at random and say nearly nothing; with 0.05 logits, of tokens and of experts,
    are spread as far as in trained models: by about 2."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=std)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model; default: random weights in the shape of Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--std", type=float, default=0.05, help="of random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engines", nargs="+", default=["embedded"], choices=("embedded", "vllm"))
    parser.add_argument("--compute", nargs="+", default=["dtype"], choices=("dtype", "fp8"))
    parser.add_argument("--kv-dtype", nargs="+", default=["auto"], choices=("auto", "fp8"))
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.model:
            folder = resolve_model(options.model)
        else:
            config = replace(SHAPES["qwen3-30b-a3b"], layers=options.layers)
            model = build_model(config, device=options.device, dtype=torch.bfloat16)
            spread(model, options.std)
            save_checkpoint(model, folder, files_from=resolve_model("tiny"))
            del model
        measure(options, folder)


if __name__ == "__main__":
    main()
