"""Weights on their way to the engines, after every step."""

import time
from collections.abc import Iterator

from torch import Tensor

from headway.config.trainer import TrainSettings
from headway.core.runs import RunPaths
from headway.models.lora import adapter_tensors
from headway.models.weights import hf_tensors
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
    tensors = hf_tensors(state.model) if state.model.adapters is None else adapter_tensors(state.model)
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
