"""Speeds of known GPUs by formula: bandwidth and peak, and what Headway was measured to reach of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from headway.base.errors import UsageError
from headway.base.gpus import GPUS, Gpu
from headway.config.rl import RlSettings
from headway.launch.memory import Shares, engine_shares, trainer_shares
from headway.launch.placement import gpus_per_engine
from headway.launch.sharing import MARGIN
from headway.models.configs.config import ModelConfig
from headway.models.costs import (
    StepFlops,
    active_parameter_count,
    block_shapes,
    kv_bytes_per_token,
    parameter_count,
    state_bytes_per_sequence,
)
from headway.plan.speeds import EngineSpeed, Speeds, TrainerSpeed
from headway.trainer.layout_report import make_layout
from headway.trainer.memory.estimate import compute_bytes
from headway.trainer.parallel.layout import Layout

MFU = 0.44
"""Share of the peak that training reaches: 0.40 to 0.49 on an H200, for 0.6B and 4B at 16k and 64k tokens
(benchmarks/results/gpu_h200.json)."""
BANDWIDTH_SHARE = 0.57
"""Share of the memory's bandwidth that a decode step reaches: 0.54 to 0.68 on an H200, for 256 and 1024 sequences."""
PREFILL_MFU = 0.4
NETWORK = 50e9
"""Bytes per second that leave a GPU for another machine: a port of 400 Gbit/s each."""
GPUS_PER_MACHINE = 8
STEP_SECONDS = 1e-3
"""What a decode step takes at the least: the host's part."""
COLLECTIVE_SECONDS = 15e-6
"""Latency of one sum over the GPUs of an engine, of which there are two in every layer."""
REQUEST_SECONDS = 0.01
UPDATE_BANDWIDTH = 10e9
"""Bytes per second of a weight update, from one trainer rank to the engines."""


def find_gpu(name: str) -> tuple[str, Gpu]:
    """Find a known GPU by its name, however that is spelled. Raises UsageError with those that there are."""
    wanted = _plain(name)
    for known, gpu in GPUS.items():
        if _plain(known) in (wanted, wanted.removeprefix("nvidia")):
            return known, gpu
    raise UsageError(f"no GPU called {name!r} is known; known are {', '.join(GPUS)}")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


@dataclass(frozen=True, kw_only=True)
class GpuEngine(EngineSpeed):
    """An engine whose decode step reads its weights and all keys and values once, or computes, whichever is longer.

    Of `expert_bytes`, a step reads those of the experts that its tokens choose, `chosen` of `experts` each.
    """

    bandwidth: float
    flops: float
    """Operations per second of all its GPUs."""
    weight_bytes: float
    expert_bytes: float
    experts: int
    chosen: int
    token_flops: float
    kv_bytes: float
    exchange_seconds: float
    exchange_per_sequence: float

    def decode(self, running: int, context: float) -> float:
        read = self.expert_bytes * (1 - (1 - self.chosen / self.experts) ** running) if self.experts else 0.0
        memory = (self.weight_bytes + read + self.kv_bytes * context) / self.bandwidth
        compute = running * self.token_flops / self.flops
        return max(STEP_SECONDS, memory, compute) + self.exchange_seconds + self.exchange_per_sequence * running


@dataclass(frozen=True, kw_only=True)
class GpuTrainer(TrainerSpeed):
    """A trainer whose ranks compute at a share of their peak. What FSDP sends hides behind computation, what goes to
    experts and between the ranks of a sequence does not."""

    step_flops: StepFlops
    layout: Layout
    seq_len: int
    ranks: int
    flops: float
    link: float

    def train(self, lengths: Sequence[int]) -> float:
        total = sum(lengths)
        micro_batches = max(1, -(-total // (self.layout.dims.data_size * self.seq_len)))
        compute = self.step_flops.count(lengths, total) / (self.ranks * self.flops)
        hidden = waited = 0.0
        for traffic in self.layout.traffic(self.seq_len):
            near = self.ranks <= GPUS_PER_MACHINE or (
                traffic.dimension in ("expert", "context") and traffic.ranks <= GPUS_PER_MACHINE
            )
            seconds = micro_batches * traffic.sent / (self.link if near else NETWORK)
            if traffic.dimension in ("expert", "context"):
                waited += seconds
            else:
                hidden += seconds
        return max(compute, hidden) + waited


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one trainer rank and of one GPU of an engine, beside what a GPU has. KV gets what is left."""

    trainer: Shares
    engine: Shares
    gpu: float

    @property
    def usable(self) -> float:
        return (1 - MARGIN) * self.gpu

    @property
    def kv_bytes(self) -> float:
        return self.usable - self.engine.total


def rank_memory(settings: RlSettings, config: ModelConfig, gpu: Gpu) -> RankMemory:
    """Estimate what each rank holds. The GPUs of one engine share its weights and its work evenly."""
    each = gpus_per_engine(settings.inference)
    whole = engine_shares(settings, config).parts
    parts = {name: size if name == "process" else size // each for name, size in whole.items()}
    return RankMemory(trainer_shares(settings, config), Shares(parts), gpu.memory)


def gpu_speeds(settings: RlSettings, config: ModelConfig, gpu: Gpu) -> Speeds:
    """Compute the speeds of an engine and of the trainer with the ranks that `settings` place."""
    return Speeds(_engine(settings, config, gpu), _trainer(settings, config, gpu))


def _engine(settings: RlSettings, config: ModelConfig, gpu: Gpu) -> GpuEngine:
    number, each = compute_bytes(settings.model.dtype), gpus_per_engine(settings.inference)
    blocks = block_shapes(config)
    experts = sum(block.experts * block.expert_weights for block in blocks)
    sparse = next((block for block in blocks if block.experts), None)
    per_token = max(1, kv_bytes_per_token(config, number, fp8=settings.inference.kv_fp8))
    states = settings.inference.max_running * state_bytes_per_sequence(config)
    kv_bytes = max(0.0, rank_memory(settings, config, gpu).kv_bytes * each - states)
    flops_per_token = 2.0 * (active_parameter_count(config) + config.vocab_size * config.width)
    rows = 2 * len(blocks) * 2 * number * config.width / gpu.link if each > 1 else 0.0
    return GpuEngine(
        prefill_seconds=flops_per_token / (each * gpu.flops * PREFILL_MFU),
        kv_tokens=max(1, int(kv_bytes / per_token)),
        max_running=settings.inference.max_running,
        request_seconds=REQUEST_SECONDS,
        update_seconds=_update_seconds(settings, config),
        bandwidth=each * gpu.bandwidth * BANDWIDTH_SHARE,
        flops=each * gpu.flops * PREFILL_MFU,
        weight_bytes=number * (parameter_count(config) - experts),
        expert_bytes=number * experts,
        experts=sparse.experts if sparse else 0,
        chosen=sparse.experts_per_token if sparse else 0,
        token_flops=flops_per_token,
        kv_bytes=per_token,
        exchange_seconds=2 * len(blocks) * COLLECTIVE_SECONDS if each > 1 else 0.0,
        exchange_per_sequence=rows,
    )


def _trainer(settings: RlSettings, config: ModelConfig, gpu: Gpu) -> GpuTrainer:
    return GpuTrainer(
        publish_seconds=0.0,  # counted with the engines' update: both are one transfer
        step_flops=StepFlops(config, frozen=settings.model.lora is not None),
        layout=make_layout(settings, config),
        seq_len=settings.seq_len,
        ranks=settings.placement.trainer_ranks,
        flops=gpu.flops * MFU,
        link=gpu.link,
    )


def _update_seconds(settings: RlSettings, config: ModelConfig) -> float:
    if settings.model.lora is not None:
        return 0.1
    return compute_bytes(settings.model.dtype) * parameter_count(config) / UPDATE_BANDWIDTH


def assumptions(name: str, gpu: Gpu) -> list[str]:
    """Say what the formulas take for granted."""
    measured = "as measured on an H200"
    where = measured if name == "H200" else f"{measured}, and not on a {name}"
    return [
        f"{name}: {gpu.flops / 1e12:,.0f} TFLOP/s dense bf16, {gpu.bandwidth / 1e12:.2f} TB/s, "
        f"{gpu.memory / 2**30:.0f} GiB of which {MARGIN:.0%} stay free, {gpu.link / 1e9:.0f} GB/s within a machine",
        f"training at {MFU:.0%} of the peak, decoding at {BANDWIDTH_SHARE:.0%} of the bandwidth ({where}), prompts at "
        f"{PREFILL_MFU:.0%} of the peak (not measured)",
        f"{GPUS_PER_MACHINE} GPUs a machine, {NETWORK / 1e9:.0f} GB/s per GPU between machines; what FSDP sends hides "
        "behind computation, what goes to experts or between ranks of a sequence does not",
        f"an update moves {UPDATE_BANDWIDTH / 1e9:.0f} GB/s; GPUs of an engine share its work evenly and sum twice a "
        f"layer, {COLLECTIVE_SECONDS * 1e6:.0f} µs each",
        "replies are admitted when the KV cache has room for all of them; experts are chosen evenly",
    ]
