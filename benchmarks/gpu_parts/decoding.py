"""Decode steps in the shapes of families whose layers are not plain, by kernels and by plain torch operations: windows,
sinks and clamped experts; recurrent layers.

PYTHONPATH=src:benchmarks python -m gpu_parts.decoding results/decoding_h200.json [--shapes gpt-oss-20b qwen3.5-4b]

Weights are random, in bfloat16. On a CPU shapes are small, to try the script.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu_parts.cases import Case, run_cases, table
from gpu_parts.engine import BANDWIDTH, ROUNDS, make_engine, serving, timed
from gpu_parts.whole_shapes import SHAPES
from headway.models.configs.cache import KvCache
from headway.models.configs.recurrent import RecurrentState
from headway.models.costs import layer_caches
from headway.models.decoder import DecoderLM
from headway.models.ops import registry
from headway.models.registry import config_from_hf

CUDA = torch.cuda.is_available()
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
WORKS = [(256, 128, 512), (64, 1024, 1024)]
"""Sequences, tokens in and out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    options = parser.parse_args()
    cases = [
        Case(f"{shape}, {'kernels' if kernels else 'plain'}", "decoding", "measure", [[shape, kernels]], 150)
        for kernels in (True, False)
        for shape in options.shapes
    ]
    rows = [row for outcome in run_cases(cases, options.results) for row in outcome.get("result", [])]
    if rows:
        print(table(list(rows[0]), [list(row.values()) for row in rows]))


def measure(shape: str, kernels: bool) -> list[dict[str, Any]]:
    """Whole engines: tokens/s and a decode step, beside the memory's floor."""
    config = config_from_hf(SHAPES[shape] if CUDA else small(SHAPES[shape]))
    if not kernels:
        # Runners that are not for tiles still decode recurrent layers and experts with kernels.
        registry.disable("triton")
    found = []
    for sequences, prompt, output in WORKS if CUDA else [(4, 20, 20)]:
        engine = make_engine(replace(config, max_len=prompt + output), sequences, prompt + output)
        with serving(engine) as generate:
            row = timed(generate, sequences, prompt, output, rounds=ROUNDS if kernels else 1)
        floor = floor_ms(engine.model, sequences, prompt + output // 2)
        work = {"shape": shape, "kernels": kernels, "sequences": sequences, "in": prompt, "out": output}
        found.append({**work, **row, "floor_ms": floor})
        del engine
        torch.cuda.empty_cache()
    return found


def small(values: dict[str, Any]) -> dict[str, Any]:
    own = {name: size for name, size in SMALL.items() if name in values}
    return values | own | {"layer_types": values["layer_types"][: SMALL["num_hidden_layers"]]}


def floor_ms(model: DecoderLM, sequences: int, context: int) -> float:
    """What reading all weights, and the keys, values and states that are seen, takes once; states are written back."""
    config = model.config
    size = model.head_weight().element_size()
    moved = sum(p.numel() * p.element_size() for p in model.parameters())
    for layer, cache in enumerate(layer_caches(config)):
        if isinstance(cache, RecurrentState):
            moved += 2 * sequences * 4 * torch.Size(cache.matrix).numel()
        elif isinstance(cache, KvCache):
            seen = min(context, config.window_of(layer) or context)
            moved += 2 * sequences * seen * config.kv_heads * config.head_dim * size
    return 1000 * moved / BANDWIDTH


if __name__ == "__main__":
    main()
