"""Weights on their way out: to the engines after every step, and to Hugging Face checkpoints for people."""

import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from headway.config.trainer import TrainSettings
from headway.core.runs import RunPaths
from headway.models.checkpoint import save_checkpoint
from headway.models.weights import hf_tensors
from headway.trainer.ranks import Ranks
from headway.trainer.state import TrainState
from headway.transport.weights import make_sender

POLICY = "policy"


class Publisher:
    """Sends the state's version to the engines: all weights in the precision of computation, or the adapter alone."""

    def __init__(self, settings: TrainSettings, paths: RunPaths) -> None:
        self._sender = make_sender(settings.weights, paths, POLICY)
        self._adapter = POLICY if settings.model.lora is not None else None

    def publish(self, state: TrainState) -> dict[str, float]:
        """Every rank calls it. Returns metrics."""
        started = time.perf_counter()
        sent = _Counted(outgoing(state))
        self._sender.publish(state.step, sent, adapter=self._adapter)
        return {"publish_seconds": time.perf_counter() - started, "publish_bytes": float(sent.bytes)}

    def close(self) -> None:
        self._sender.close()


def outgoing(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """One tensor at a time, whole; ranks that share the weights must iterate alike."""
    if state.model.adapters is None:
        tensors = hf_tensors(state.model)
    else:
        from headway.models.lora import adapter_tensors

        tensors = adapter_tensors(state.model)
    for name, tensor in tensors:
        yield name, tensor.detach().to(state.compute_dtype)


class _Counted:
    """Passes tensors on and counts their bytes."""

    def __init__(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._tensors = tensors
        self.bytes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors:
            self.bytes += tensor.numel() * tensor.itemsize
            yield name, tensor


def export(state: TrainState, paths: RunPaths, ranks: Ranks) -> Path:
    """Write `exports/step_NNNNNN`, which transformers can load. Every rank calls it; the first one writes."""
    folder = paths.exports / f"step_{state.step:06d}"
    save_checkpoint(state.model, folder, dtype=state.compute_dtype, files_from=state.folder, write=ranks.is_main)
    ranks.barrier()
    return folder
