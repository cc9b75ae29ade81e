"""Publishing of weights to the engines, after every step."""

import time
from collections.abc import Iterator

from torch import Tensor

from headway.config.trainer import TrainSettings
from headway.core.runs import RunPaths
from headway.models.adapters.lora import adapter_tensors
from headway.models.checkpoints.tensors import base_parameters, checkpoint_tensors
from headway.trainer.probe import make_probe
from headway.trainer.state import TrainState
from headway.transport.weights import make_sender
from headway.transport.weights.shards import Shard, split_parameter

POLICY = "policy"


class Publisher:
    """Sends a state's version to the engines: all weights in the precision of computation, or the adapter alone."""

    def __init__(self, settings: TrainSettings, paths: RunPaths) -> None:
        self._sender = make_sender(settings.weights, paths, POLICY)
        self._adapter = POLICY if settings.model.lora is not None else None
        # An engine adds an adapter to weights that it has verified, or loaded from the checkpoint, before.
        self._probes = settings.trainer.probe and self._adapter is None
        self._seq_len = settings.seq_len

    def publish(self, state: TrainState) -> dict[str, float]:
        """Publish the state's version. Every rank calls it. Returns metrics."""
        started = time.perf_counter()
        probe = make_probe(state, self._seq_len) if self._probes else None
        sent, dtype = _Counted(outgoing(state)), state.compute_dtype
        self._sender.publish(state.step, sent, adapter=self._adapter, probe=probe, dtype=dtype)
        return {
            "publish_seconds": time.perf_counter() - started,
            "publish_bytes": float(sent.elements * dtype.itemsize),
        }

    def close(self) -> None:
        self._sender.close()


def outgoing(state: TrainState) -> Iterator[tuple[str, Tensor | Shard]]:
    """Yield the tensors of a version as they are trained, in the same order on every rank.

    Each rank sends the rows of a sharded parameter that it holds, also where checkpoints have it as several tensors. An
    adapter is small: it is gathered, since half of its tensors are sent transposed.
    """
    if state.model.adapters is not None:
        yield from ((name, tensor.detach()) for name, tensor in adapter_tensors(state.model))
        return
    for name, parameter in base_parameters(state.model):
        tensor = parameter.detach()
        targets = checkpoint_tensors(state.model, name)
        if any(target.at for target in targets):
            yield from split_parameter(tensor, ((target.name, target.at) for target in targets))
        else:
            yield from ((target.name, tensor) for target in targets)


class _Counted:
    """Passes tensors on and counts their elements."""

    def __init__(self, tensors: Iterator[tuple[str, Tensor | Shard]]) -> None:
        self._tensors = tensors
        self.elements = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor | Shard]]:
        for name, tensor in self._tensors:
            self.elements += tensor.numel()
            yield name, tensor
