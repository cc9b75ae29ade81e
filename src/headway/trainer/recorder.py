"""Metrics of every step: collected from all ranks, written by the first."""

import logging
import resource
import sys
import time

import torch
from torch import Tensor

from headway.config.shared import TrackingSettings
from headway.core.runs import RunPaths
from headway.monitor.metrics import MetricsWriter
from headway.monitor.sinks import make_sinks
from headway.trainer.flops import peak_flops
from headway.trainer.parallel.ranks import Ranks

logger = logging.getLogger(__name__)


class Recorder:
    """Adds throughput, memory and MFU to the metrics of a step, and writes one line per step."""

    def __init__(
        self,
        paths: RunPaths,
        ranks: Ranks,
        resume_step: int,
        max_steps: int,
        tracking: TrackingSettings | None = None,
        log_interval: int = 1,
    ) -> None:
        self._ranks, self._max_steps, self._log_interval = ranks, max_steps, log_interval
        self._writer = None
        if ranks.is_main:
            sinks = make_sinks(tracking, paths, "trainer") if tracking is not None else []
            self._writer = MetricsWriter(paths, "trainer", resume_step=resume_step, sinks=sinks)
        self._peak = peak_flops(ranks.device)

    def record(self, step: int, metrics: dict[str, float], expert_load_LE: Tensor | None) -> None:
        """Every rank calls it with the step's metrics, among them tokens, flops and step_seconds.

        `expert_load` is that of all ranks together.
        """
        slowest = self._ranks.max({"step_seconds": metrics["step_seconds"], "memory": peak_memory(self._ranks.device)})
        seconds = slowest["step_seconds"]
        metrics = metrics | expert_balance(expert_load_LE)
        metrics |= {
            "step_seconds": seconds,
            "tokens_per_second": metrics["tokens"] / seconds,
            "peak_memory_gib": slowest["memory"] / 2**30,
        }
        flops = metrics.pop("flops")
        if self._peak is not None:
            metrics["mfu"] = flops / seconds / (self._peak * self._ranks.size)
        if self._writer is not None:
            self._writer.log(step, metrics)
            self._log(step, metrics)

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        held_out = metrics.get("validation/loss")
        if step % self._log_interval and step != self._max_steps and held_out is None:
            return
        validation = "" if held_out is None else f"  validation {held_out:.4g}"
        logger.info(
            "step %d/%d  loss %.4g%s  grad %.3g  kl %.2g  %.0f tok/s",
            step,
            self._max_steps,
            metrics["loss"],
            validation,
            metrics["grad_norm"],
            metrics["mismatch_kl"],
            metrics["tokens_per_second"],
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Stopwatch:
    """Measures the parts of a step one after the other."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


def expert_balance(load_LE: Tensor | None) -> dict[str, float]:
    """Compute how evenly tokens spread over experts: the busiest's load over the mean, and the share without any."""
    if load_LE is None:
        return {}
    load_LE = load_LE.detach().cpu().double()
    load_LE = load_LE[load_LE.sum(1) > 0]
    return {
        "experts/max_over_mean": float((load_LE.max(1).values / load_LE.mean(1)).mean()),
        "experts/idle": float((load_LE == 0).double().mean()),
    }


def peak_memory(device: torch.device) -> float:
    """Peak bytes: of the device since the last call, or of this process on a CPU."""
    if device.type == "cuda":
        peak = float(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others kilobytes
