"""Judge what ranks that share one GPU computed, held and took (`parallel.measure`, `parallel_equality.equality`)."""

from collections.abc import Iterator, Mapping
from typing import Any

from gpu_parts.rows import Call, Judge, Part, Row

PARTS = ("parallel-equality", "parallel-experts", "parallel-context", "parallel-offload", "parallel-estimate")
"""Of `gpu.py --parts`; `parallel` is all of them."""
ESTIMATE_BAR = 0.15
ROUNDING = 1.5
"""Several ranks may be so many times as far from float32 as one rank is."""
LOSS_GAP, NORM_GAP = 1e-3, 1e-2
PAIRS = {
    "parallel-experts": ("30b-a3b shape, 1 rank", "30b-a3b shape, expert 2"),
    "parallel-context": ("qwen3-4b lora 131k, 1 rank", "qwen3-4b lora 131k, context 4"),
    "parallel-offload": ("qwen3-4b lora 32k, kept", "qwen3-4b lora 32k, offloaded"),
}
"""Rows of `parallel.STEPS`: a step, and one that is compared with it."""
SECONDS = {"parallel-experts": 110, "parallel-context": 220, "parallel-offload": 90}
ONE_GPU = (
    "qwen3-0.6b rl full 16k",
    "qwen3-0.6b rl full 64k",
    "qwen3-0.6b rl lora 16k",
    "qwen3-4b rl lora 16k",
    "qwen3-4b rl lora 64k",
)
"""Rows of `trainer.ROWS` whose memory docs/one_gpu.md compares with its estimate."""


def parallel_parts(groups: list[str], results: Mapping[str, Any]) -> Iterator[Part]:
    """Parts in order; `results` fills up while they are run."""
    if "parallel-equality" in groups:
        yield Part("parallel_equality", "equality", 90, {"parallel equality": Call([], judge_equality)})
    for group, (alone, other) in PAIRS.items():
        if group in groups:
            calls = {
                f"parallel {alone}": Call([alone], judge_step(alone)),
                f"parallel {other}": Call([other], judge_step(other, alone, results)),
            }
            yield Part("parallel", "measure", SECONDS[group], calls)
    if "parallel-estimate" in groups:
        calls = {f"memory {row}": Call([row], judge_memory(row)) for row in ONE_GPU}
        yield Part("trainer", "measure", 90, calls)


def judge_equality(result: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    alone = result["1 rank"]
    for layout, found in result.items():
        if "error" in found:
            yield Row(f"{layout}: the ranks", found["error"][:60], False)
            continue
        for name in ("gradients", "updates"):
            error, bar = found[f"{name}_to_float32"], ROUNDING * alone[f"{name}_to_float32"]
            if layout == "1 rank":
                yield Row(f"{layout}, bf16: {name}, distance to float32", f"{error:.2g}")
            else:
                holds = error <= bar and found[f"{name}_to_one_rank"] <= bar
                ours = f"{error:.2g}, to one rank {found[f'{name}_to_one_rank']:.2g}"
                yield Row(f"{layout}, bf16: {name}, distance to float32", ours, holds, bar=f"<= {bar:.2g}")
        if layout != "1 rank":
            gap, norm = found["loss_gap"], found["grad_norm_gap"]
            yield Row(f"{layout}, bf16: loss beside one rank's", f"{gap:.2g}", gap <= LOSS_GAP, bar=f"<= {LOSS_GAP}")
            name = f"{layout}, bf16: gradient norm beside one rank's"
            yield Row(name, f"{norm:.2g}", norm <= NORM_GAP, bar=f"<= {NORM_GAP}")


def judge_step(name: str, alone: str | None = None, results: Mapping[str, Any] | None = None) -> Judge:
    """`alone` names the step that it is compared with, among `results`."""

    def judge(result: Mapping[str, Any]) -> Iterator[Row]:
        before = (results or {}).get(f"parallel {alone}")
        seconds, peak = result["step_seconds"], max(result["allocated_gib"])
        beside, ratio = "", None
        if before is not None:
            beside, ratio = f"{before['step_seconds']:.2f}", before["step_seconds"] / seconds
        yield Row(f"{name}: seconds a step", f"{seconds:.2f}", anchor=beside, ratio=ratio)
        if before is not None:
            beside, ratio = f"{max(before['allocated_gib']):.1f}", max(before["allocated_gib"]) / peak
        yield Row(f"{name}: peak GiB per rank", f"{peak:.1f}", anchor=beside, ratio=ratio)
        held, estimate = max(result["held_gib"]), result["estimated_held_gib"]
        yield estimate_row(name, held, estimate)

    return judge


def judge_memory(name: str) -> Judge:
    def judge(result: Mapping[str, Any]) -> Iterator[Row]:
        yield estimate_row(name, result["held_gib"], result["estimated_held_gib"])

    return judge


def estimate_row(name: str, held: float, estimate: float) -> Row:
    low, high = (held * (1 + sign * ESTIMATE_BAR) for sign in (-1, 1))
    ours = f"{estimate:.1f} of {held:.1f}"
    return Row(f"{name}: estimated GiB of held", ours, low <= estimate <= high, bar=f"{low:.1f} to {high:.1f}")
