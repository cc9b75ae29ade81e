"""FP8 with block scales on one GPU: kernels against the reference, speed of products, an engine and a trainer in FP8
beside themselves in bfloat16.

PYTHONPATH=benchmarks python -m gpu_parts.fp8 check | products | engine fp8 | trainer "qwen3-8b rl lora 16k fp8"
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from engine_parts.work import SHAPES
from gpu_parts.engine import ROUNDS, floor_ms, make_engine, prompts
from gpu_parts.trainer import measure as measure_training
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.embedded.engine import EmbeddedEngine
from headway.models.ops.fp8.blocks import fp8_matmul, quantize_1x128, quantize_128x128, quantize_columns
from headway.models.ops.fp8.linear import fp8_linears, fp8_lora_linears

ODD = [(1, 128, 128), (64, 4096, 4096), (37, 576, 1536), (130, 200, 136), (2000, 1024, 3072), (513, 2560, 1152)]
"""Rows, inputs, outputs: of a decode step, of packed batches, and not of whole blocks."""
WIDE = [(16_384, 1024, 3072), (16_384, 2560, 9728), (16_384, 9728, 2560), (16_384, 4096, 6144), (16_384, 4096, 24_576),
        (16_384, 12_288, 4096)]  # fmt: skip
NARROW = [
    (rows, *shape) for rows in (16, 64, 256) for shape in [(4096, 6144), (4096, 4096), (4096, 24_576), (12_288, 4096)]
]


def check() -> list[dict[str, Any]]:
    """Relative errors of kernels against the reference on the same device; bit-equal quantization is 0."""
    found = []
    for rows, inputs, outputs in ODD:
        x, weight = _normal(rows, inputs), _normal(outputs, inputs)
        name = f"{rows}x{inputs}x{outputs}"
        for op, args in (
            (quantize_1x128, (x,)), (quantize_columns, (x,)), (quantize_128x128, (weight, torch.bfloat16)),
            (quantize_128x128, (weight.float(), torch.bfloat16, True)),
        ):  # fmt: skip
            ours, theirs = op(*args), op.reference(*args)
            error = max(_distance(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))
            found.append({"name": f"{op.name} {name}", "error": error, "tolerance": 1e-4})
        a, b, c = quantize_1x128(x), quantize_128x128(weight, torch.bfloat16), quantize_1x128(weight)
        for kind, right in (("128x128", b), ("1x128", c)):
            wanted = fp8_matmul.reference(*a, *right)
            for backend in fp8_matmul.backends:
                if backend.takes(*a, *right):
                    for dtype, tolerance in ((torch.float32, 2e-3), (torch.bfloat16, 5e-3)):
                        error = _distance(backend.run(*a, *right, dtype).float(), wanted)
                        label = f"{backend.kind} product {kind} {name} {str(dtype)[6:]}"
                        found.append({"name": label, "error": error, "tolerance": tolerance})
        found += _check_gradients(x, weight, name)
    return found


def _check_gradients(x: Tensor, weight: Tensor, name: str) -> list[dict[str, Any]]:
    """Of the layer on the GPU against the layer on a CPU, which has the reference's arithmetic."""
    probe = _normal(len(x), len(weight))
    down, up = _normal(8, x.shape[1]) * 0.1, _normal(8, len(weight)) * 0.1
    found = []
    for kind in ("full", "lora"):
        results = []
        for device in ("cuda", "cpu"):
            own = [t.to(device).detach().requires_grad_() for t in (x, weight.float(), down, up)]
            if kind == "full":
                out, wanted = fp8_linears(own[0], [own[1]]), own[:2]
            else:
                out, wanted = fp8_lora_linears(own[0], [own[1].detach()], [own[2]], [own[3]], 0.5), [own[0], *own[2:]]
            grads = torch.autograd.grad(out, wanted, probe.to(device))
            results.append([out, *grads])
        for label, ours, theirs in zip(("output", "dx", "dw", "dup"), *results, strict=False):
            error = _distance(ours.detach().float().cpu(), theirs.detach().float())
            found.append({"name": f"{kind} {label} {name}", "error": error, "tolerance": 0.02})
    return found


def products() -> dict[str, Any]:
    """Milliseconds and TFLOP/s of products, in bfloat16 and FP8, and of what is quantized for them."""
    found = {}
    for rows, inputs, outputs in WIDE:
        x, weight, grad = _normal(rows, inputs), _normal(outputs, inputs), _normal(rows, outputs)
        a, b, bt = quantize_1x128(x), quantize_128x128(weight, x.dtype), quantize_128x128(weight, x.dtype, True)
        g, gc, xc = quantize_1x128(grad), quantize_columns(grad), quantize_columns(x)
        ms = {
            "bf16": _milliseconds(lambda x=x, w=weight: x @ w.T),
            "fp8": _milliseconds(lambda a=a, b=b: fp8_matmul(*a, *b, torch.bfloat16)),  # type: ignore[call-arg]
            "fp8_triton": _milliseconds(lambda a=a, b=b: _triton(*a, *b, torch.bfloat16)),
            "fp8_dx": _milliseconds(lambda a=g, b=bt: fp8_matmul(*a, *b, torch.bfloat16)),  # type: ignore[call-arg]
            "fp8_dw": _milliseconds(lambda a=gc, b=xc: fp8_matmul(*a, *b, torch.float32)),  # type: ignore[call-arg]
            "bf16_dw": _milliseconds(lambda x=x, g=grad: torch.mm(g.T, x, out_dtype=torch.float32)),
            "quantize_x": _milliseconds(lambda x=x: quantize_1x128(x)),
            "quantize_x_columns": _milliseconds(lambda x=x: quantize_columns(x)),
            "quantize_weight": _milliseconds(lambda w=weight: quantize_128x128(w, torch.bfloat16)),
            "quantize_weight_transposed": _milliseconds(lambda w=weight: quantize_128x128(w, torch.bfloat16, True)),
        }  # fmt: skip
        flops = 2e-9 * rows * inputs * outputs
        speed = {f"{k}_tflops": round(flops / v) for k, v in ms.items() if "quantize" not in k}
        found[f"{rows}x{inputs}x{outputs}"] = {k: round(v, 4) for k, v in ms.items()} | speed
    for rows, inputs, outputs in NARROW:
        x, weight = _normal(rows, inputs), _normal(outputs, inputs)
        a, b = quantize_1x128(x), quantize_128x128(weight, x.dtype)
        us: dict[str, Any] = {
            "bf16": 1000 * _milliseconds(lambda x=x, w=weight: x @ w.T, graph=True),
            "quantize": 1000 * _milliseconds(lambda x=x: quantize_1x128(x), graph=True),
            "floor_fp8": weight.numel() / 4.3e6,
        }
        for backend in fp8_matmul.backends:
            try:
                work = lambda r=backend.run, a=a, b=b: r(*a, *b, torch.bfloat16)  # noqa: E731
                us[f"fp8_{backend.kind}"] = 1000 * _milliseconds(work, graph=True)
            except Exception as error:
                us[f"fp8_{backend.kind}_error"] = str(error)[:80]
        found[f"us {rows}x{inputs}x{outputs}"] = {k: round(v, 1) if isinstance(v, float) else v for k, v in us.items()}
    return found


def engine(compute: str, shape: str = "qwen3-8b", sequences: int = 64, prompt: int = 128, output: int = 256) -> Any:
    """A decode step, from the difference of long and short generations, and the kernels that it spends its time in."""
    started = time.perf_counter()
    own = make_engine(SHAPES[shape], sequences, prompt + output, fp8=compute == "fp8")
    _generate(own, sequences, prompt, 32)
    start_seconds = time.perf_counter() - started
    prefill = median(_generate(own, sequences, prompt, 1) for _ in range(ROUNDS))
    seconds = median(_generate(own, sequences, prompt, output) for _ in range(ROUNDS))
    return {
        "tokens_per_second": sequences * output / seconds,
        "decode_step_ms": 1000 * (seconds - prefill) / (output - 1),
        "floor_ms": floor_ms(own.model, sequences, prompt + output // 2),
        "prefill_seconds": prefill,
        "start_seconds": start_seconds,
        "gib": torch.cuda.memory_allocated() / 2**30,
        "kernels_ms_per_step": kernels(lambda: _generate(own, sequences, prompt, 32), 32),
    }


def trainer(name: str) -> dict[str, Any]:
    """As in `trainer.measure`, and the kernels of a step."""
    return measure_training(name, lambda step: kernels(step, 1))


def kernels(work: Callable[[], Any], steps: int, most: int = 14) -> dict[str, float]:
    """Milliseconds of the kernels that take most of the device's time, per step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    events = sorted(record.key_averages(), key=lambda event: -event.self_device_time_total)
    return {
        f"{e.key[:70]} x{e.count // steps}": round(e.self_device_time_total / 1000 / steps, 3) for e in events[:most]
    }


def _generate(engine: EmbeddedEngine, sequences: int, prompt: int, output: int) -> float:
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    started = time.perf_counter()
    for number, tokens in enumerate(prompts(sequences, prompt)):
        engine.add(GenerateRequest(tokens, sampling_params=params), str(number))
    while not engine.idle:
        engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _triton(*args: Any) -> Tensor:
    from headway.models.ops.triton.fp8 import fp8_matmul as run

    return run(*args)


def _milliseconds(work: Callable[[], Any], *, graph: bool = False) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    if graph:
        # Weights do not stay in the cache between the layers of a model: 50 MB are written between two calls.
        flush = torch.empty(2**26, dtype=torch.uint8, device="cuda")
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(20):
                flush.zero_()
                work()
        alone = torch.cuda.CUDAGraph()
        with torch.cuda.graph(alone):
            for _ in range(20):
                flush.zero_()
        return (_elapsed(captured.replay) - _elapsed(alone.replay)) / 20
    return min(_elapsed(lambda: [work() for _ in range(5)]) for _ in range(3)) / 5


def _elapsed(work: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def _normal(*shape: int) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=draw)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30))


if __name__ == "__main__":
    function, *arguments = sys.argv[1:]
    print(json.dumps(globals()[function](*arguments), indent=2))
