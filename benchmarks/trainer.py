"""How fast the trainer trains: tokens/s, peak memory and MFU for a model's shape, on random tokens and weights.

    python benchmarks/trainer.py                      # CPU, beside a plain Hugging Face + AdamW loop
    python benchmarks/trainer.py --device cuda --model qwen3-0.6b --seq-len 16384 --checkpoint selective

On a CPU both sides train the same samples of mixed lengths in turns, each in a process of its own: ours packed, theirs
padded. Tokens are those of samples, never padding. Memory is the peak above what the process had before the model.
Tokens per CPU second hold on a machine that others use too. Bars: 1.2 times the loop's tokens per CPU second, and less
memory than it takes; saved as benchmarks/results/trainer_cpu.json. Exits with 1 when one does not hold.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.config.trainer import TrainSettings
from headway.core.batches import ComponentCounts
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.registry import config_to_hf
from headway.trainer.feed import fake_lengths, fake_micro_batch
from headway.trainer.flops import peak_flops
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.state import make_state
from headway.trainer.step import Stepper
from headway.transport.rollouts import RankBatch

QWEN3: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "rope_theta": 1e6,
    "tied": True,
    "max_len": 40_960,
}
SHAPES = {
    "small": ModelConfig("qwen3", 8192, 256, 6, 4, 2, 64, 768, tied=True, max_len=4096),
    "qwen3-0.6b": ModelConfig(width=1024, layers=28, heads=16, kv_heads=8, mlp_width=3072, **QWEN3),
    "qwen3-4b": ModelConfig(width=2560, layers=36, heads=32, kv_heads=8, mlp_width=9728, **QWEN3),
}


RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a packed micro-batch")
    parser.add_argument(
        "--mean-len", type=int, help="mean of mixed sample lengths; default: 128 on CPU, one sample on CUDA"
    )
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after one that warms up")
    parser.add_argument("--checkpoint", choices=("off", "selective", "full"), default="off")
    parser.add_argument("--attention-layers", type=int, help="with selective: layers that keep attention's output")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--head-chunk", type=int, default=1024)
    parser.add_argument("--lora-rank", type=int, help="train an adapter of this rank")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--rounds", type=int, default=3, help="CPU: how often each side runs")
    parser.add_argument("--side", choices=("ours", "huggingface"), help="run one side in this process, print JSON")
    options = parser.parse_args()
    if options.mean_len is None and options.device == "cpu":
        options.mean_len = 128
    if options.side == "huggingface":
        print(json.dumps(run_huggingface(options)))
    elif options.side == "ours" or options.device == "cuda":
        print(json.dumps(run_ours(options)))
    else:
        return 0 if compare(options) else 1
    return 0


def lengths_of(options: argparse.Namespace, step: int) -> list[list[int]]:
    """Sample lengths per micro-batch: the same for both sides."""
    rng = np.random.default_rng(step)
    return [fake_lengths(rng, options.seq_len, options.mean_len) for _ in range(options.micro_batches)]


def run_ours(options: argparse.Namespace) -> dict[str, float]:
    trainer: dict[str, Any] = {
        "head_chunk": options.head_chunk,
        "compile": options.compile,
        "activations": {
            "checkpoint": options.checkpoint,
            "attention_layers": options.attention_layers,
            "offload": options.offload,
        },
        "optim": {"type": options.optimizer},
    }
    model = {} if options.lora_rank is None else {"lora": {"rank": options.lora_rank}}
    settings = TrainSettings.model_validate(
        {"placement": {"device": options.device}, "model": model, "trainer": trainer, "seq_len": options.seq_len}
    )
    with joined(settings) as ranks:
        return measure_ours(options, settings, ranks)


def measure_ours(options: argparse.Namespace, settings: TrainSettings, ranks: Ranks) -> dict[str, float]:
    before = memory(ranks.device)
    shape = SHAPES[options.model]
    shape = replace(shape, max_len=max(shape.max_len, options.seq_len))
    state = make_state(settings, ranks, Path(), shape, random_weights)
    stepper = Stepper(settings, ranks)
    seconds, cpu_seconds, tokens, flops = [], 0.0, 0, 0.0
    for step in range(options.steps + 1):
        rng = np.random.default_rng(step)
        vocab = state.config.vocab_size
        micros = [fake_micro_batch(lengths, vocab, rng) for lengths in lengths_of(options, step)]
        counts = ComponentCounts(rl=sum(int(np.count_nonzero(micro.rl_weight)) for micro in micros))
        synchronize(ranks.device)
        started, worked = time.perf_counter(), time.process_time()
        report = stepper.step(state, RankBatch(step + 1, micros, counts))
        synchronize(ranks.device)
        if step:
            seconds.append(time.perf_counter() - started)
            cpu_seconds += time.process_time() - worked
            tokens += int(report.metrics["tokens"])
            flops += report.metrics["flops"]
    result = {
        "tokens_per_second": tokens / sum(seconds),
        "tokens_per_cpu_second": tokens / cpu_seconds,
        "step_seconds": statistics.median(seconds),
        "peak_memory_gib": (memory(ranks.device) - before) / 2**30,
    }
    peak = peak_flops(ranks.device)
    return result if peak is None else result | {"mfu": flops / sum(seconds) / peak}


@torch.no_grad()
def random_weights(model: DecoderLM) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.02)
        elif "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.zero_()


def run_huggingface(options: argparse.Namespace) -> dict[str, float]:
    """What a script of twenty lines does: pad to the longest sample, cross-entropy inside the model, AdamW."""
    from transformers import AutoConfig, AutoModelForCausalLM

    before = memory(torch.device("cpu"))
    shape = config_to_hf(SHAPES[options.model])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    seconds, cpu_seconds, tokens = [], 0.0, 0
    for step in range(options.steps + 1):
        generator = torch.Generator().manual_seed(step)
        started, worked = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        for lengths in lengths_of(options, step):
            mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
            ids = torch.randint(config.vocab_size, mask.shape, generator=generator)
            labels = ids.masked_fill(~mask, -100)
            model(input_ids=ids, attention_mask=mask.long(), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step:
            seconds.append(time.perf_counter() - started)
            cpu_seconds += time.process_time() - worked
            tokens += sum(sum(lengths) for lengths in lengths_of(options, step))
    return {
        "tokens_per_second": tokens / sum(seconds),
        "tokens_per_cpu_second": tokens / cpu_seconds,
        "step_seconds": statistics.median(seconds),
        "peak_memory_gib": (memory(torch.device("cpu")) - before) / 2**30,
    }


def compare(options: argparse.Namespace) -> bool:
    """Both sides in turns, so that whatever else the machine does meets both; medians decide. Whether the bars hold."""
    results: dict[str, list[dict[str, float]]] = {"ours": [], "huggingface": []}
    for round_ in range(options.rounds):
        for side, found in results.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {round_ + 1} {side:<12} {found[-1]}", flush=True)
    best = {side: _medians(found) for side, found in results.items()}
    ratios = {name: value / best["huggingface"][name] for name, value in best["ours"].items()}
    print(f"{'':<24} {'ours':>10} {'huggingface':>12} {'ratio':>7}")
    for name, ratio in ratios.items():
        print(f"{name:<24} {best['ours'][name]:>10.4g} {best['huggingface'][name]:>12.4g} {ratio:>6.2f}x")
    about = {"model": options.model, "seq_len": options.seq_len, "mean_len": options.mean_len, "rounds": options.rounds}
    saved = {"work": about, "threads": torch.get_num_threads(), "results": best, "ratios": ratios}
    (RESULTS / "trainer_cpu.json").write_text(json.dumps(saved, indent=2) + "\n")
    return ratios["tokens_per_cpu_second"] >= 1.2 and ratios["peak_memory_gib"] < 1


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(result[name] for result in found) for name in found[0]}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def memory(device: torch.device) -> float:
    """The peak so far, in bytes."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


if __name__ == "__main__":
    sys.exit(main())
