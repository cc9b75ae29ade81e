"""What the tests of vLLM ask for on this machine: its CPU build, or a GPU that they share with others.

On a GPU, HEADWAY_TEST_DTYPE may say "bfloat16"; otherwise everything is held to float32's rounding. With
HEADWAY_TEST_EAGER=0 vLLM compiles the model, which takes its time, and records CUDA graphs.
"""

import json
import os
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
DTYPE = os.environ.get("HEADWAY_TEST_DTYPE", "float32") if ON_GPU else "float32"
EAGER = os.environ.get("HEADWAY_TEST_EAGER", "1") == "1"
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}
TOLERANCE = TOLERANCES[DTYPE]
"""Between logprobs that vLLM serves and those of the same weights in float32."""
KV_GB = 1.0


def vllm_arguments(**more: Any) -> dict[str, Any]:
    """For `[inference.vllm]`."""
    return {"enforce_eager": EAGER, **more} if ON_GPU else more


def vllm_flags() -> list[str]:
    """The same for a command line."""
    if not ON_GPU:
        return []
    flags = ["--model.dtype", DTYPE, "--inference.kv_memory_gb", str(KV_GB)]
    for name, value in vllm_arguments().items():
        flags += [f"--inference.vllm.{name}", json.dumps(value)]
    return flags
