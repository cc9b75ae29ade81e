"""vLLM by itself with an image in every prompt, on one GPU: the work of `gpu_parts.vision`.

PYTHONPATH=benchmarks python -m gpu_parts.vision_vllm    # needs vLLM and torchvision
"""

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from gpu_parts.vision import GRID, SHAPE, TEXT
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.models.vision.config import VisionConfig

SEQUENCES, OUTPUT, SIDE = 64, 256, 448


def measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        config = _save(Path(name))
        llm = _load(name)
        found = {kind: _rounds(llm, config, kind == "images") for kind in ("images", "texts")}
    return {"vllm": found}


def _save(folder: Path) -> VisionConfig:
    files = resolve_model("tiny-vl")
    tiny = load_config(files)
    assert isinstance(tiny, VisionConfig)
    ids = ("image_token", "video_token", "vision_start_token", "vision_end_token", "eos_ids", "pad_id")
    config = replace(SHAPE, **{name: getattr(tiny, name) for name in ids})
    save_checkpoint(build_model(config, device="cuda", dtype=torch.bfloat16), folder, files_from=files)
    torch.cuda.empty_cache()
    processor = json.loads((files / "preprocessor_config.json").read_text())
    processor |= {"patch_size": config.tower.patch, "merge_size": config.tower.merge}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return config


def _load(folder: str) -> Any:
    from vllm import LLM

    return LLM(
        folder,
        max_model_len=2048,
        max_num_seqs=SEQUENCES,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 1, "video": 0},
        attention_config={"backend": "FLASH_ATTN"},
        mm_encoder_attn_backend="TORCH_SDPA",
    )


def _rounds(llm: Any, config: VisionConfig, images: bool) -> dict[str, float]:
    """Images differ from round to round. In the last rounds they come again, so that vLLM has them processed."""
    _round(llm, config, 4, images, 0)
    prefill = median(_round(llm, config, 1, images, seed) for seed in (1, 2, 3))
    whole = median(_round(llm, config, OUTPUT, images, seed) for seed in (4, 5, 6))
    again = median(_round(llm, config, OUTPUT, images, seed) for seed in (6, 6, 6))
    return {
        "tokens_per_second": SEQUENCES * OUTPUT / whole,
        "tokens_per_second_again": SEQUENCES * OUTPUT / again,
        "prefill_seconds": prefill,
        "decode_step_ms": 1000 * (whole - prefill) / (OUTPUT - 1),
    }


def _round(llm: Any, config: VisionConfig, output: int, images: bool, seed: int) -> float:
    from vllm import SamplingParams

    given = [_prompt(config, (seed, number), images) for number in range(SEQUENCES)]
    params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False)
    started = time.perf_counter()
    llm.generate(given, params, use_tqdm=False)
    return time.perf_counter() - started


def _prompt(config: VisionConfig, seed: tuple[int, int], images: bool) -> dict[str, Any]:
    from PIL import Image

    draw = np.random.default_rng(seed)
    # Below the tokenizer's special tokens: vLLM's processor would take those for images.
    words = draw.integers(20, 90, TEXT + GRID.patches // 4).tolist()
    if not images:
        return {"prompt_token_ids": words}
    seen = [config.vision_start_token, config.image_token, config.vision_end_token]
    picture = Image.fromarray(draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8))
    tokens = words[: TEXT // 2 - 1] + seen + words[: TEXT // 2 - 1]
    return {"prompt_token_ids": tokens, "multi_modal_data": {"image": picture}}


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
