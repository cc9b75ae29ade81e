"""Eight LoRA runs on one GPU: a trainer and an engine that they share, beside one run, and beside eight in turns.

PYTHONPATH=benchmarks python -m gpu_parts.tenants qwen3-4b
"""

import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_parts.engine import make_engine, prompts
from gpu_parts.weights import SHAPES
from headway.config.shared import LoraSettings
from headway.config.trainer import TrainSettings
from headway.core.batches import ComponentCounts
from headway.core.protocol import GenerateRequest, SamplingParams, WeightUpdate
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.running.device_runner import DeviceRunner
from headway.inference.embedded.service import EmbeddedService
from headway.models.adapters.adaptable import adaptable_weights
from headway.models.adapters.peft import peft_tensors
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.decoder import DecoderLM
from headway.trainer.feed import fake_micro_batch
from headway.trainer.tenants.trainer import TenantTrainer
from headway.transport.rollouts import RankBatch

TENANTS, RANK = 8, 16
PASS, SAMPLE = 16_384, 2048
"""Tokens of a micro-batch, in samples that are as long for one tenant as for eight."""
STEPS, WARM = 5, 2
SEQUENCES, PROMPT, OUTPUT, ROUNDS = 256, 128, 256, 3


def measure_trainer(shape: str) -> dict[str, Any]:
    """Tokens per second of steps of one tenant, of eight in the same passes, and of eight whose passes take turns."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        save_checkpoint(build_model(SHAPES[shape], device="cuda", dtype=torch.bfloat16, seed=2), Path(folder))
        torch.cuda.empty_cache()
        settings = _settings(folder)
        trainer = TenantTrainer(settings)
    vocab = SHAPES[shape].vocab_size
    trainer.join("alone", settings)
    alone = _speed(trainer, {"alone": PASS // SAMPLE}, vocab, together=True)
    trainer.leave("alone")
    gc.collect()
    before = torch.cuda.memory_allocated()
    for number in range(TENANTS):
        trainer.join(f"tenant{number}", settings)
    joined = torch.cuda.memory_allocated() - before
    samples = {f"tenant{number}": PASS // SAMPLE // TENANTS for number in range(TENANTS)}
    torch.cuda.reset_peak_memory_stats()
    together = _speed(trainer, samples, vocab, together=True)
    turns = _speed(trainer, samples, vocab, together=False)
    return {
        "one_tenant_tokens_per_second": alone,
        "eight_tenants_tokens_per_second": together,
        "eight_in_turns_tokens_per_second": turns,
        "of_one_tenant": together / alone,
        "of_turns": together / turns,
        "mib_per_tenant_joined": joined / TENANTS / 2**20,
        "mib_per_tenant_trained": (torch.cuda.memory_allocated() - before) / TENANTS / 2**20,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def _settings(folder: str) -> TrainSettings:
    return TrainSettings.model_validate(
        {
            "model": {"path": folder, "dtype": "bfloat16", "lora": {"rank": RANK}},
            "placement": {"device": "cuda"},
            "trainer": {"head_chunk": 1024, "activations": {"checkpoint": "selective"}},
            "seq_len": PASS,
        }
    )


def _speed(trainer: TenantTrainer, samples: dict[str, int], vocab: int, *, together: bool) -> float:
    """Tokens per second of steps in which each tenant trains so many samples, in passes of all or one by one."""
    seconds = []
    for _ in range(WARM + STEPS):
        batches = {name: _batch(trainer.tenants[name].step + 1, count, vocab) for name, count in samples.items()}
        torch.cuda.synchronize()
        started = time.perf_counter()
        for name, batch in batches.items():
            trainer.submit(name, batch)
            if not together:
                trainer.run()
        reports = trainer.run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        assert all(report.error is None for report in reports), reports
    return sum(samples.values()) * SAMPLE / statistics.median(seconds[WARM:])


def _batch(number: int, samples: int, vocab: int) -> RankBatch:
    micro = fake_micro_batch([SAMPLE] * samples, vocab, np.random.default_rng(number))
    return RankBatch(number, [micro], ComponentCounts(rl=int(np.count_nonzero(micro.rl_weight))))


def measure_engine(shape: str) -> dict[str, Any]:
    """Tokens per second of 256 sequences with the base model, with one adapter, and with eight among them."""
    engine = make_engine(SHAPES[shape], SEQUENCES, PROMPT + OUTPUT)
    service = EmbeddedService(engine, fingerprint="")
    found: dict[str, Any] = {}
    with asyncio.Runner() as runner:
        runner.run(service.start())
        found["base"] = _decode(runner, service, ["policy"])
        _load_adapters(engine, range(1))
        found["one_adapter"] = _decode(runner, service, ["tenant0"])
        before = torch.cuda.memory_allocated()
        _load_adapters(engine, range(1, TENANTS))
        found["mib_per_adapter"] = (torch.cuda.memory_allocated() - before) / (TENANTS - 1) / 2**20
        names = [f"tenant{number}" for number in range(TENANTS)]
        found["eight_adapters"] = _decode(runner, service, names)
        graphs = _graphs(engine)
        _load_adapters(engine, range(TENANTS))  # new versions of all
        found["after_updates"] = _decode(runner, service, names[::-1], warm=False)
        found["graphs"], found["graphs_after_updates"] = graphs, _graphs(engine)
        runner.run(service.close())
    return found | {"of_base": found["eight_adapters"] / found["base"]}


def _decode(runner: asyncio.Runner, service: EmbeddedService, models: list[str], *, warm: bool = True) -> float:
    if warm:
        runner.run(_round(service, models, 64))
    return SEQUENCES * OUTPUT / statistics.median(runner.run(_round(service, models, OUTPUT)) for _ in range(ROUNDS))


async def _round(service: EmbeddedService, models: list[str], output: int) -> float:
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    asked = enumerate(prompts(SEQUENCES, PROMPT))
    started = time.perf_counter()
    await asyncio.gather(*(service.generate(GenerateRequest(p, models[n % len(models)], params)) for n, p in asked))
    return time.perf_counter() - started


def _load_adapters(engine: EmbeddedEngine, numbers: range) -> None:
    settings = LoraSettings(rank=RANK)
    for number in numbers:
        update = WeightUpdate(1, "", {"type": "filesystem"}, adapter=f"tenant{number}")
        engine.adapters.load(update, _adapter(engine.model, number), settings)


def _adapter(model: DecoderLM, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator("cuda").manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for weight in adaptable_weights(model):
        rows, columns = weight.weight.shape
        a = 0.01 * torch.randn(RANK, columns, generator=draw, device="cuda", dtype=torch.bfloat16)
        b = 0.01 * torch.randn(RANK, rows, generator=draw, device="cuda", dtype=torch.bfloat16)
        tensors |= dict(peft_tensors(weight, a, b))
    return tensors


def _graphs(engine: EmbeddedEngine) -> int:
    return len(engine.runner.graphs) if isinstance(engine.runner, DeviceRunner) else 0


if __name__ == "__main__":
    print(json.dumps({"engine": measure_engine(sys.argv[1]), "trainer": measure_trainer(sys.argv[1])}, indent=2))
