"""Both engines on the work of the mission in one run: long contexts, and a mixture of experts.

PYTHONPATH=src:benchmarks python -m gpu_parts.beside_vllm results/mission_h200.json [--shapes qwen3-30b-a3b]

Weights are random, in bfloat16. Each engine is a process and has the GPU to itself, one after the other, since their
caches do not fit side by side. On a CPU the models are tiny, to try the script.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine_parts.work import SHAPES
from gpu_parts.cases import Case, Outcome, run_cases, table
from gpu_parts.engine import Generate, floor_ms, prompts, serving, timed
from gpu_parts.rows import ENGINE_ANCHORS
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.models.build import build_model
from headway.models.configs.config import ModelConfig
from headway.models.registry import config_to_hf

Work = tuple[int, int, int]
"""Sequences, tokens in, tokens out."""

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
WORK: dict[str, list[Work]] = {
    "qwen3-30b-a3b": [(256, 128, 512), (64, 1024, 2048)],
    "qwen3-8b": [(128, 1024, 2048)],
    "qwen3-0.6b": [(128, 1024, 4096)],
}
BLOCK_SIZE, BATCHED_TOKENS = 16, 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--seconds", type=float, default=1200.0, help="in all (%(default)s)")
    options = parser.parse_args()
    cases = [
        Case(f"{engine} {shape}", "beside_vllm", "measure", [[engine, shape]], 300)
        for shape in options.shapes
        for engine in options.engines
    ]
    outcomes = run_cases(cases, options.results, seconds=options.seconds)
    head = ("shape, sequences, in / out", "tokens/s", "vLLM", "ratio", "bar", "step ms", "vLLM", "floor")
    print(table(head, list(_compared(outcomes, options.shapes))))


def _compared(outcomes: Sequence[Outcome], shapes: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    found = {outcome["case"]: outcome["result"]["rows"] for outcome in outcomes if "result" in outcome}
    for shape in shapes:
        for number, work in enumerate(WORK[shape]):
            ours, theirs = (found.get(f"{engine} {shape}", [{}] * 9)[number] for engine in ENGINES)
            speeds = [row.get("tokens_per_second") for row in (ours, theirs)]
            yield (
                f"{shape}, {work[0]}, {work[1]} / {work[2]}",
                *(speed and round(speed) for speed in speeds),
                speeds[0] / speeds[1] if all(speeds) else None,
                ENGINE_ANCHORS[shape, *work].times,
                *(row.get("decode_step_ms") for row in (ours, theirs)),
                ours.get("floor_ms"),
            )


def measure(engine: str, shape: str) -> dict[str, Any]:
    """A row for each work of the shape, and the seconds until the engine had answered once."""
    started = time.perf_counter()
    config = SHAPES[shape] if ON_GPU else _small(SHAPES[shape])
    works = WORK[shape] if ON_GPU else [(3, 16, output // 256) for _, _, output in WORK[shape]]
    with ENGINES[engine](config, works) as generate:
        generate(1, 16, 1)
        start_seconds = time.perf_counter() - started
        rows = [{"work": work} | timed(generate, *work) for work in works]
    shadow = build_model(config, device="meta", dtype=DTYPE, seed=None)
    for row, (sequences, prompt, output) in zip(rows, works, strict=True):
        row["floor_ms"] = floor_ms(shadow, sequences, prompt + output // 2)
    return {"start_seconds": start_seconds, "rows": rows}


@contextmanager
def embedded(config: ModelConfig, works: Sequence[Work]) -> Iterator[Generate]:
    blocks = max(sequences * -(-(prompt + output) // BLOCK_SIZE) for sequences, prompt, output in works)
    running = max(sequences for sequences, _, _ in works)
    limits = EngineLimits(running, BATCHED_TOKENS, _longest(works), blocks, BLOCK_SIZE, prefix_cache=False)
    with serving(EmbeddedEngine(build_model(config, device=DEVICE, dtype=DTYPE).eval(), limits)) as generate:
        yield generate


@contextmanager
def vllm(config: ModelConfig, works: Sequence[Work]) -> Iterator[Generate]:
    """vLLM by itself, as it comes: compiled, with CUDA graphs of the sizes that occur."""
    # This process has a CUDA context, which a fork could not use.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    own: dict[str, Any] = {}
    if ON_GPU:
        sizes = sorted({1, *(work[0] for work in works)})
        own = {
            "attention_config": {"backend": "FLASH_ATTN"},
            "compilation_config": {"cudagraph_capture_sizes": sizes},
        }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_to_hf(config)))
        engine = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=str(DTYPE).removeprefix("torch."),
            max_num_seqs=max(work[0] for work in works),
            max_model_len=_longest(works),
            enable_prefix_caching=False,
            **own,
        )

        def generate(sequences: int, prompt: int, output: int) -> float:
            params = SamplingParams(max_tokens=output, ignore_eos=True, logprobs=0, detokenize=False)
            given = [{"prompt_token_ids": tokens} for tokens in prompts(sequences, prompt, config.vocab_size)]
            started = time.perf_counter()
            engine.generate(given, params, use_tqdm=False)
            return time.perf_counter() - started

        yield generate


ENGINES = {"headway": embedded, "vllm": vllm}


def _longest(works: Sequence[Work]) -> int:
    return max(prompt + output for _, prompt, output in works)


def _small(config: ModelConfig) -> ModelConfig:
    small = replace(config, vocab_size=512, width=64, layers=2, heads=4, kv_heads=2, head_dim=32, mlp_width=64)
    return replace(small, experts=8, experts_per_token=2, expert_width=32) if config.experts else small


if __name__ == "__main__":
    main()
