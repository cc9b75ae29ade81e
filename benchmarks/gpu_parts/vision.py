"""A model that sees on one GPU: sampling with an image in every prompt, and training on images, each beside texts of as
many tokens.

PYTHONPATH=benchmarks python -m gpu_parts.vision [cpu]
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from gpu_parts.trainer import random_weights
from headway.config.trainer import TrainSettings
from headway.core.batches import ComponentCounts, MicroBatch
from headway.core.images import Grid, ImageUse, TokenImages, image_digest
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.core.samples import Sample
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.inference.images import ServedImage
from headway.inference.outputs import Result
from headway.models.build import build_model
from headway.models.vision.config import TowerConfig, VisionConfig
from headway.trainer.parallel.ranks import joined
from headway.trainer.state import make_state
from headway.trainer.step import Stepper
from headway.transport.rollouts import RankBatch

SHAPE = VisionConfig(
    "qwen2_5_vl", 151_936, 2048, 36, 16, 2, 128, 11_008, rope_theta=1e6, attention_bias=True, tied=True, max_len=32_768,
    mrope_section=(16, 24, 24),
    tower=TowerConfig(32, 1280, 3420, 16, 14, 2048, window=112, full_layers=(7, 15, 23, 31)),
)  # fmt: skip
"""Qwen2.5-VL-3B's."""
SMALL = replace(
    SHAPE, width=128, layers=2, heads=4, head_dim=32, mlp_width=128, mrope_section=(4, 6, 6),
    tower=TowerConfig(2, 64, 128, 4, 14, 128, window=112, full_layers=(1,)),
)  # fmt: skip
GRID = Grid(1, 32, 32)
"""448 x 448 pixels."""
TEXT = 32


def measure(device: str = "cuda") -> dict[str, Any]:
    apart = _apart(device)
    print(json.dumps({"largest_difference_to_the_cpu": apart}), flush=True)
    shape, sequences, output = (SHAPE, 64, 256) if device == "cuda" else (SMALL, 2, 8)
    sampling = {kind: _sample(shape, device, sequences, output, kind == "images") for kind in ("images", "texts")}
    print(json.dumps(sampling), flush=True)
    training = {kind: _train(shape, device, sequences // 2, kind == "images") for kind in ("images", "texts")}
    return {"largest_difference_to_the_cpu": apart, "sampling": sampling, "training": training}


def _apart(device: str) -> float:
    """How far greedy logprobs in float32 are, at most, from those of the CPU's engine: images and texts in one batch,
    prompts in chunks, decoding."""
    answers = []
    for where in (device, "cpu"):
        model = build_model(SMALL, device="cpu", seed=3).to(where).eval()
        engine = EmbeddedEngine(model, EngineLimits(4, 200, 512, 256, 16, prefix_cache=False))
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
        for number in range(6):
            tokens, seen = _prompt(SMALL, (9, number), number % 3 < 2)
            engine.add(GenerateRequest(tokens, sampling_params=params), str(number), None, seen)
        found: dict[str, list[float]] = {}
        while not engine.idle:
            for request, event in engine.step():
                if isinstance(event, Result):
                    found[request.request_id] = event.choices[0].logprobs
        answers.append(found)
    return max(abs(a - b) for name in answers[0] for a, b in zip(answers[0][name], answers[1][name], strict=True))


def _sample(shape: VisionConfig, device: str, sequences: int, output: int, images: bool) -> dict[str, float]:
    model = build_model(shape, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32).eval()
    length = GRID.patches // 4 + TEXT + output
    blocks = sequences * -(-length // 16)
    engine = EmbeddedEngine(model, EngineLimits(sequences, 8192, length, blocks, 16, prefix_cache=False))
    _round(engine, shape, sequences, 4, images, 0)
    prefill = median(_round(engine, shape, sequences, 1, images, seed) for seed in (1, 2, 3))
    whole = median(_round(engine, shape, sequences, output, images, seed) for seed in (4, 5, 6))
    return {
        "tokens_per_second": sequences * output / whole,
        "prefill_seconds": prefill,
        "decode_step_ms": 1000 * (whole - prefill) / (output - 1),
    }


def _round(engine: EmbeddedEngine, shape: VisionConfig, sequences: int, output: int, images: bool, seed: int) -> float:
    given = [_prompt(shape, (seed, number), images) for number in range(sequences)]
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    started = time.perf_counter()
    for number, (tokens, seen) in enumerate(given):
        engine.add(GenerateRequest(tokens, sampling_params=params), f"{seed}.{number}", None, seen)
    while not engine.idle:
        engine.step()
    return time.perf_counter() - started


def _prompt(shape: VisionConfig, seed: tuple[int, int], images: bool) -> tuple[list[int], tuple[ServedImage, ...]]:
    draw, count = np.random.default_rng(seed), GRID.patches // 4
    words = draw.integers(0, 90_000, TEXT + count).tolist()
    if not images:
        return words, ()
    patches = draw.standard_normal((GRID.patches, shape.tower.patch_numbers), dtype=np.float32)
    use = ImageUse(TEXT // 2, count, image_digest(patches.tobytes()))
    words[TEXT // 2 : TEXT // 2 + count] = [shape.image_token] * count
    return words, (ServedImage(use, GRID, patches),)


def _train(shape: VisionConfig, device: str, samples: int, images: bool) -> dict[str, float]:
    """A step on one micro-batch of samples of 512 tokens, half of each an image's."""
    settings = TrainSettings.model_validate(
        {"placement": {"device": device}, "seq_len": samples * 512, "trainer": {"head_chunk": 2048}}
    )
    with joined(settings) as ranks:
        state, stepper = make_state(settings, ranks, Path(), shape, random_weights), Stepper(settings, ranks)
        micro = MicroBatch.join([_sample_of(shape, number, images) for number in range(samples)])
        batch = RankBatch(1, [micro], ComponentCounts(ce=int(np.count_nonzero(micro.ce_weight))))
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            stepper.step(state, batch)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    step = median(seconds[2:])
    held = torch.cuda.max_memory_reserved() / 2**30 if device == "cuda" else 0.0
    return {"step_seconds": step, "tokens_per_second": samples * 512 / step, "held_gib": held}


def _sample_of(shape: VisionConfig, number: int, images: bool) -> Sample:
    draw, count, sample = np.random.default_rng(number), GRID.patches // 4, Sample.blank(512)
    sample.token_ids = draw.integers(0, 90_000, 512, dtype=np.int32)
    sample.ce_weight[TEXT + count :] = 1
    if images:
        patches = draw.standard_normal((GRID.patches, shape.tower.patch_numbers), dtype=np.float32)
        sample.images = TokenImages.of([(str(number), GRID, patches)], [(TEXT, 0)])
        sample.token_ids[TEXT : TEXT + count] = shape.image_token
    return sample


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:]), indent=2))
