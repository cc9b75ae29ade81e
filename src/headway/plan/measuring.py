"""Measurements of an engine and of a trainer at a few shapes, each in a process of its own."""

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec

from headway.base.devices import resolve_dtype
from headway.base.errors import HeadwayError
from headway.base.files import write_atomic
from headway.base.processes import die_with_parent_environment
from headway.config.commands import process_settings
from headway.config.loader import write_settings
from headway.config.rl import RlSettings
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.core.runs import RunPaths
from headway.launch.placement import visible_gpus
from headway.models.costs import adapter_count, parameter_count
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.monitor.metrics import read_metrics
from headway.transport.inference import InferenceClient

SEQUENCES = (1, 8, 32, 64)
PROMPT, LONG_PROMPT = 16, 512
FEW, MANY = 8, 40
"""Tokens of replies: the difference is decoding alone."""
ROUNDS = 3
TRAIN_STEPS, MICRO_BATCHES = 6, (1, 3)
MOST_WRITTEN = 64 << 20
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
SLOW = "the model is too large for this machine, or others use it; try again, or give --gpu"


class EngineFigures(msgspec.Struct, frozen=True):
    """Seconds of a decode step, of one more sequence in it and of each token that it attends to; of each token of a
    prompt, and of a request whatever it asks for. `kv_tokens` is the size of its cache."""

    fixed: float
    per_sequence: float
    per_context_token: float
    prefill: float
    request: float
    kv_tokens: int


class TrainerFigures(msgspec.Struct, frozen=True):
    """Seconds of a training step, of each token in it, and of publishing its weights."""

    fixed: float
    per_token: float
    publish: float


def measure_engine(settings: RlSettings, folder: Path, environment: dict[str, str], deadline: float) -> EngineFigures:
    """Measure an engine over HTTP, as a run asks it. Raises HeadwayError where it fails or `deadline` passes."""
    inference = settings.inference.model_copy(update={"host": "127.0.0.1", "port": 0, "role": "both"})
    file = folder / "inference.toml"
    write_settings(process_settings(settings.model_copy(update={"inference": inference}))["inference"], file)
    with _server(file, folder, environment, deadline) as url:
        return asyncio.run(_time_engine(url, settings, deadline))


@contextmanager
def _server(file: Path, folder: Path, environment: dict[str, str], deadline: float) -> Iterator[str]:
    log = folder / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "headway.cli.main", "serve", "@", str(file)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | environment | die_with_parent_environment(),
        )
    try:
        while (line := _serving_line(log)) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise HeadwayError(f"the engine to be measured does not serve: {_last_line(log)}")
            time.sleep(0.1)
        yield line.split(" at ")[1].split()[0]
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _serving_line(log: Path) -> str | None:
    return next((line for line in log.read_text(errors="replace").splitlines() if line.startswith("serving ")), None)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it says nothing"


class _Rounds:
    """Rounds of requests to an engine, timed until a deadline. Prompts differ, so that no prefix is known."""

    def __init__(self, client: InferenceClient, deadline: float) -> None:
        self._client, self._deadline, self._rng = client, deadline, random.Random(0)

    async def seconds(self, sequences: int, prompt: int, reply: int) -> float:
        """Return the median time of some rounds. Raises TimeoutError after the deadline."""
        times = []
        for _ in range(ROUNDS):
            requests = [self._request(prompt, reply) for _ in range(sequences)]
            async with asyncio.timeout(max(1.0, self._deadline - time.monotonic())):
                began = time.perf_counter()
                await asyncio.gather(*(self._client.generate(request) for request in requests))
            times.append(time.perf_counter() - began)
        return median(times)

    def _request(self, prompt: int, reply: int) -> GenerateRequest:
        tokens = [self._rng.randrange(3, 90) for _ in range(prompt)]
        return GenerateRequest(tokens, sampling_params=SamplingParams(max_tokens=reply, ignore_eos=True))


async def _time_engine(url: str, settings: RlSettings, deadline: float) -> EngineFigures:
    client = InferenceClient(url)
    rounds = _Rounds(client, deadline)
    try:
        state = await client.state()
        longest = min(LONG_PROMPT, state.max_model_len - MANY - 1)
        most = min(settings.inference.max_running, SEQUENCES[-1])
        counts = sorted({min(count, most) for count in SEQUENCES})
        await rounds.seconds(most, PROMPT, FEW)  # warms up
        few = {count: await rounds.seconds(count, PROMPT, FEW) for count in counts}
        steps = [(await rounds.seconds(count, PROMPT, MANY) - few[count]) / (MANY - FEW) for count in counts]
        fixed, per_sequence = fit_line(counts, steps)
        middle = counts[len(counts) // 2]
        far = await rounds.seconds(middle, longest, FEW)
        further = (await rounds.seconds(middle, longest, MANY) - far) / (MANY - FEW)
        near = fixed + per_sequence * middle
        prefill = max(0.0, (far - few[middle]) / (middle * (longest - PROMPT)))
        at_once = few[most] - FEW * (fixed + per_sequence * most)
        return EngineFigures(
            fixed=fixed,
            per_sequence=per_sequence,
            per_context_token=max(0.0, (further - near) / (middle * (longest - PROMPT))),
            prefill=prefill,
            request=max(0.0, at_once / most - prefill * PROMPT),
            kv_tokens=state.kv_capacity_tokens,
        )
    except TimeoutError:
        raise HeadwayError(f"the engine was not measured in time: {SLOW}") from None
    finally:
        await client.close()


def fit_line(at: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Fit a line by least squares, with no negative part: what it has at 0, and how much it rises."""
    middle, mean = sum(at) / len(at), sum(values) / len(values)
    spread = sum((x - middle) ** 2 for x in at)
    slope = sum((x - middle) * (y - mean) for x, y in zip(at, values, strict=True)) / spread if spread else 0.0
    slope = min(max(slope, 0.0), mean / middle)
    return max(mean - slope * middle, 0.0), slope


def measure_trainer(settings: RlSettings, folder: Path, environment: dict[str, str], deadline: float) -> TrainerFigures:
    """Measure a trainer on random tokens. Raises HeadwayError where it fails or `deadline` passes."""
    file, tokens, seconds = folder / "trainer.toml", [], []
    length = min(settings.seq_len, 2048)
    write_settings(process_settings(settings.model_copy(update={"seq_len": length}))["trainer"], file)
    for count in MICRO_BATCHES:
        lines = _train(file, folder, count, length, environment, deadline)
        measured = lines[len(lines) // 3 :]
        tokens.append(median(line["tokens"] for line in measured))
        seconds.append(median(line["step_seconds"] for line in measured))
    fixed, per_token = fit_line(tokens, seconds)
    return TrainerFigures(fixed, per_token, _publish_seconds(settings, folder))


def _publish_seconds(settings: RlSettings, folder: Path) -> float:
    """Time the writing of a version, or of a part of one that is large."""
    config = load_config(resolve_model(settings.model.path, settings.model.family), settings.model.implementation)
    lora = settings.model.lora
    weights = parameter_count(config) if lora is None else adapter_count(config, lora)
    size = weights * NUMBER_BYTES[resolve_dtype(settings.model.dtype, "cuda" if visible_gpus() else "cpu")]
    written = os.urandom(min(size, MOST_WRITTEN))
    began = time.perf_counter()
    write_atomic(folder / "version", written)
    return (time.perf_counter() - began) * size / len(written)


def _train(
    file: Path, folder: Path, micro_batches: int, length: int, environment: dict[str, str], deadline: float
) -> list[dict[str, float]]:
    name = f"train-{micro_batches}"
    flags = {
        "run.output_dir": str(folder),
        "run.name": name,
        "max_steps": str(TRAIN_STEPS),
        "trainer.fake_data.micro_batches": str(micro_batches),
        "trainer.fake_data.mean_len": str(max(16, length // 8)),
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "headway.cli.main", "train", "@", str(file), *words],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | environment | die_with_parent_environment(),
        )
    try:
        code = process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise HeadwayError(f"the trainer was not measured in time: {SLOW}") from None
    finally:
        process.kill()
        process.wait()
    lines = list(read_metrics(RunPaths(folder / name).metrics / "trainer.jsonl"))
    if code or not lines:
        raise HeadwayError(f"the trainer to be measured fails: {_last_line(log)}")
    return lines
