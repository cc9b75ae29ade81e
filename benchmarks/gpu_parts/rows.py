"""What `gpu.py` measures, what it is compared with, and when that is good enough.

The parts are modules beside this one. Functions run in processes of their own and return what JSON can hold:

- `engine.measure(shape, sequences)`: `tokens_per_second`, `decode_step_ms`, `floor_ms` (its memory traffic)
- `trainer.measure(row)` for each row of `trainer.ROWS`: `tokens_per_second`, `peak_gib`
- `weights.measure(shape)`: `seconds`, `paused_seconds`
- `learning.prepare(model, folder)`: seconds of warm-up by task
- `learning.measure(folder, kept, seconds)`: by task `before`, `after`, `first_reward`, `last_reward`,
  `mismatch_kl`, `seconds`, and why it `failed`, if it did
- `families.check(shape)`: a list of `name`, largest `error`, `mean` error, `tolerance` (or None), `note`
- `engine.check()`, `trainer.check()`, `weights.check()`: a list of `name`, `error`, `tolerance`, or errors by a name
  that ends in a precision
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CLEAR_RISE = 0.2
"""How much more of the held-out tasks a model must solve after a run than before it."""
UPDATE_SECONDS, PAUSED_SECONDS = 0.5, 0.1


@dataclass(frozen=True)
class Row:
    """A line of the table. `bar` and `floor` are in the unit of `ours`; `ratio` is to the anchor, above 1 is better."""

    name: str
    ours: str
    holds: bool | None = None
    anchor: str = ""
    ratio: float | None = None
    bar: str = ""
    floor: str = ""


Judge = Callable[[Any], Iterator[Row]]


@dataclass(frozen=True)
class Call:
    """Arguments of a part's function, and what to make of its result."""

    arguments: list[Any]
    judge: Judge


@dataclass(frozen=True)
class Part:
    """Calls of a function in one process, by name, `seconds` for all of them; an `elastic` one is told what is left.

    A part that is `untimed` may have another one beside it, which is `beside`.
    """

    module: str
    function: str
    seconds: float
    calls: dict[str, Call]
    elastic: bool = False
    untimed: bool = False
    beside: bool = False


@dataclass(frozen=True)
class TrainerAnchor:
    """prime-rl's table, one H100 (an H200 has its arithmetic): tokens/s, peak GiB, and how much faster is asked for."""

    tokens_per_second: float
    peak_gib: float
    times: float


TRAINER_ANCHORS = {
    "qwen3-0.6b rl full 16k": TrainerAnchor(16_400, 12.5, 2.0),
    "qwen3-0.6b rl full 64k": TrainerAnchor(10_200, 19.6, 1.5),
    "qwen3-0.6b sft full 16k": TrainerAnchor(25_500, 52.8, 2.0),
    "qwen3-0.6b rl lora 16k": TrainerAnchor(13_300, 5.1, 2.0),
    "qwen3-4b rl lora 16k": TrainerAnchor(6_200, 23.3, 2.0),
    "qwen3-4b rl lora 64k": TrainerAnchor(4_160, 42.0, 1.5),
}
PACKED, WHOLE, PACKED_SHARE = "qwen3-0.6b rl packed 16k", "qwen3-0.6b rl full 16k", 0.85
"""Packed batches of log-normal lengths keep this share of the tokens/s of one long sequence."""


@dataclass(frozen=True)
class EngineAnchor:
    """vLLM 0.26.0 on one H200 (bf16, temperature 1, logprobs): tokens/s, and the multiple asked for; a decode step may
    take `floors` times what its memory traffic takes."""

    tokens_per_second: float
    times: float | None
    floors: float = 2.0
    mission: bool = False


ENGINE_ANCHORS = {
    ("qwen3-0.6b", 256, 128, 512): EngineAnchor(22_177, 1.5),
    ("qwen3-4b", 256, 128, 512): EngineAnchor(20_365, 1.0),
    ("qwen3-0.6b", 1024, 128, 512): EngineAnchor(18_090, None),
    ("qwen3-0.6b", 128, 1024, 4096): EngineAnchor(10_063, 1.0, 1.2, mission=True),
    ("qwen3-8b", 128, 1024, 2048): EngineAnchor(7_415, 1.1, 1.2, mission=True),
    ("qwen3-30b-a3b", 256, 128, 512): EngineAnchor(10_599, 1.2, mission=True),
    ("qwen3-30b-a3b", 64, 1024, 2048): EngineAnchor(3_022, 1.2, mission=True),
}
"""By shape, concurrent sequences, tokens in and tokens out."""


TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Of logprobs, by the precision of computation."""


def judge_check(part: str) -> Judge:
    def judge(result: list[Mapping[str, Any]] | Mapping[str, float]) -> Iterator[Row]:
        if isinstance(result, Mapping):
            result = [
                {"name": name.replace("_", " "), "error": error, "tolerance": TOLERANCES[name.rpartition("_")[2]]}
                for name, error in result.items()
            ]
        for item in result:
            error, tolerance = float(item["error"]), float(item["tolerance"])
            yield Row(f"{part}: {item['name']}", f"{error:.2g}", error <= tolerance, bar=f"<= {tolerance:.2g}")

    return judge


def judge_families(shape: str) -> Judge:
    def judge(result: list[Mapping[str, Any]]) -> Iterator[Row]:
        for item in result:
            error, tolerance = item["error"], item["tolerance"]
            holds, bar = (None, "") if tolerance is None else (error <= tolerance, f"<= {tolerance:.2g}")
            ours = f"{error:.2g} (mean {item['mean']:.2g})"
            yield Row(f"{shape}: {item['name']}", ours, holds, anchor=item["note"], bar=bar)

    return judge


def judge_engine(shape: str, sequences: int, prompt: int, output: int) -> Judge:
    def judge(result: Mapping[str, float]) -> Iterator[Row]:
        name, speed = f"engine {shape}, {sequences} sequences, {prompt}/{output}", result["tokens_per_second"]
        anchor = ENGINE_ANCHORS[shape, sequences, prompt, output]
        asked = None if anchor.times is None else anchor.times * anchor.tokens_per_second
        yield Row(
            f"{name}: tokens/s",
            f"{speed:,.0f}",
            None if asked is None else speed >= asked,
            f"vLLM {anchor.tokens_per_second:,}",
            speed / anchor.tokens_per_second,
            "" if asked is None else f">= {asked:,.0f}",
        )
        step, floor = result["decode_step_ms"], result["floor_ms"]
        most = anchor.floors * floor
        yield Row(f"{name}: ms a step", f"{step:.2f}", step <= most, bar=f"<= {most:.2f}", floor=f"{floor:.2f}")

    return judge


FP8_ROWS = [
    ("engine", 70, ["qwen3-8b, 64 sequences"]),
    ("trainer", 60, ["qwen3-8b rl lora 16k", "qwen3-4b rl full 16k"]),
]
"""Function of the part, seconds, rows; each is measured in bfloat16 and in FP8."""
FP8_TIMES = {"engine": 1.5, "trainer": 1.25}


def judge_products(result: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    for shape, found in result.items():
        yield Row(f"products {shape}", ", ".join(f"{name} {value}" for name, value in found.items())[:160])


def judge_fp8(name: str, earlier: Mapping[str, Any]) -> Judge:
    """A row in FP8 is compared with the same in bfloat16, which was measured before it."""

    def judge(result: Mapping[str, float]) -> Iterator[Row]:
        speed = result["tokens_per_second"]
        plain = earlier.get(name.removesuffix("fp8") + "bf16", {}).get("tokens_per_second")
        if name.endswith("bf16") or not plain:
            yield Row(f"{name}: tokens/s", f"{speed:,.0f}")
        else:
            times = FP8_TIMES[name.split()[1]]
            bar = times * plain
            yield Row(name, f"{speed:,.0f}", speed >= bar, f"bf16 {plain:,.0f}", speed / plain, f">= {bar:,.0f}")
        if "peak_gib" in result:
            yield Row(f"{name}: peak GiB", f"{result['peak_gib']:.1f}")
        else:
            floor = f"{result['floor_ms']:.2f}"
            yield Row(f"{name}: ms a step", f"{result['decode_step_ms']:.2f}", floor=floor)

    return judge


def judge_trainer(name: str, earlier: Mapping[str, Any]) -> Judge:
    """`earlier` holds the results of the rows before, for rows that are compared with one of them."""

    def judge(result: Mapping[str, float]) -> Iterator[Row]:
        speed, peak = result["tokens_per_second"], result["peak_gib"]
        if name == PACKED:
            whole = earlier.get(f"trainer {WHOLE}", {}).get("tokens_per_second")
            bar = PACKED_SHARE * whole if whole else None
            yield Row(
                f"trainer {name}: tokens/s",
                f"{speed:,.0f}",
                None if bar is None else speed >= bar,
                f"one sequence {whole:,.0f}" if whole else "",
                speed / whole if whole else None,
                f">= {bar:,.0f}" if bar else "",
            )
            return
        anchor = TRAINER_ANCHORS[name]
        bar = anchor.times * anchor.tokens_per_second
        yield Row(
            f"trainer {name}: tokens/s",
            f"{speed:,.0f}",
            speed >= bar,
            f"prime-rl {anchor.tokens_per_second:,.0f}",
            speed / anchor.tokens_per_second,
            f">= {bar:,.0f}",
        )
        yield Row(
            f"trainer {name}: peak GiB",
            f"{peak:.1f}",
            peak <= anchor.peak_gib,
            f"prime-rl {anchor.peak_gib}",
            anchor.peak_gib / peak,
            f"<= {anchor.peak_gib}",
        )

    return judge


def judge_weights(shape: str) -> Judge:
    def judge(result: Mapping[str, float]) -> Iterator[Row]:
        for what, name, bar in (
            ("seconds", "seconds", UPDATE_SECONDS),
            ("paused_seconds", "seconds without decoding", PAUSED_SECONDS),
        ):
            yield Row(f"update of {shape}: {name}", f"{result[what]:.3f}", result[what] < bar, bar=f"< {bar}")

    return judge


def judge_preparation(result: Mapping[str, float]) -> Iterator[Row]:
    yield Row("rl: conversion and warm-ups, beside the checks", f"{max(result.values()):.0f} s")


def judge_learning(result: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    for task, run in result.items():
        if run["failed"] or "after" not in run:
            yield Row(f"rl {task}: the run", (run["failed"] or "nothing was evaluated in time")[:60], False)
        if "after" not in run:
            continue
        rise = run["after"] - run["before"]
        yield Row(
            f"rl {task}: held-out reward",
            f"{run['before']:.2f} -> {run['after']:.2f} in {run['seconds']:.0f} s",
            rise >= CLEAR_RISE,
            bar=f"+{CLEAR_RISE}",
        )
        rewards = f"{run['first_reward']:.2f} -> {run['last_reward']:.2f}"
        yield Row(f"rl {task}: training reward", f"{rewards}, KL at most {run['mismatch_kl']:.0e}")
