"""Publishing of weights to the engines, after every step."""

import logging
import time
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from headway.config.shared import HttpWeights
from headway.config.trainer import TrainSettings
from headway.core.control import RunControl
from headway.core.protocol import WeightProbe
from headway.core.runs import RunPaths
from headway.models.adapters.lora import adapter_tensors
from headway.models.checkpoints.tensors import base_parameters, checkpoint_tensors, float32_tensors
from headway.trainer.probe import make_probe
from headway.trainer.state import TrainState
from headway.transport.control.client import JoinedControl
from headway.transport.control.folder import FolderControl
from headway.transport.weights import make_sender
from headway.transport.weights.shards import ParameterPart, Shard, split_parameter

logger = logging.getLogger(__name__)

POLICY = "policy"


class Publisher:
    """Sends a state's version to the engines: all weights in the precision of computation, or the adapter alone."""

    def __init__(self, settings: TrainSettings, paths: RunPaths, control: RunControl | None = None) -> None:
        """`control` is that of the run; without one, the run is this host's folder."""
        control = control or FolderControl(paths)
        self._sender = make_sender(settings.weights, paths, POLICY, control, settings.tls)
        # A version is announced in the folder of this host; the run of another host has to be told.
        self._elsewhere = control if isinstance(control, JoinedControl) else None
        fetched_here = isinstance(settings.weights, HttpWeights) or self._elsewhere is not None
        self.serves_from_here = fetched_here and settings.trainer.fake_data is None
        """Engines fetch from this process, or from this host's own folder, so it has to outlive the last update."""
        self._adapter = POLICY if settings.model.lora is not None else None
        self._alpha = None if settings.model.lora is None else settings.model.lora.alpha
        # An engine adds an adapter to weights that it has verified, or loaded from the checkpoint, before.
        self._probes = settings.trainer.probe and self._adapter is None
        self._seq_len = settings.seq_len

    def publish(self, state: TrainState) -> dict[str, float]:
        """Publish the state's version. Every rank calls it. Returns metrics."""
        probe = make_probe(state, self._seq_len) if self._probes else None
        return self.publish_tensors(
            state.step, outgoing(state), state.compute_dtype, uncast=float32_tensors(state.model), probe=probe
        )

    def publish_tensors(
        self,
        version: int,
        tensors: Iterable[tuple[str, Tensor | Shard]],
        dtype: torch.dtype,
        *,
        uncast: Collection[str] = (),
        probe: WeightProbe | None = None,
    ) -> dict[str, float]:
        """Publish a version of these tensors, those not in `uncast` as `dtype`. Returns metrics."""
        started = time.perf_counter()
        sent = _Counted(tensors)
        update = self._sender.publish(
            version, sent, adapter=self._adapter, probe=probe, dtype=dtype, uncast=uncast, alpha=self._alpha
        )
        if self._elsewhere is not None and self._sender.is_first:
            self._elsewhere.announce(update)
        return {
            "publish_seconds": time.perf_counter() - started,
            "publish_bytes": float(sent.elements * dtype.itemsize),
        }

    def restore(self, state: TrainState) -> None:
        """Publish the state's version again if someone removed it: engines need it. Every rank calls it."""
        if self.lost():
            logger.warning("version %d was removed from disk and is published again", state.step)
            self.publish(state)

    def lost(self) -> bool:
        """Tell if someone removed the version that was published last."""
        return self._sender.lost()

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
        sent = checkpoint_tensors(state.model, name)
        if any(part.at or part.transposed for part in sent):
            yield from split_parameter(tensor, (ParameterPart(part.name, part.at, part.transposed) for part in sent))
        else:
            yield from ((part.name, tensor) for part in sent)


class _Counted:
    """Passes tensors on and counts their elements."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor | Shard]]) -> None:
        self._tensors = tensors
        self.elements = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor | Shard]]:
        for name, tensor in self._tensors:
            self.elements += tensor.numel()
            yield name, tensor
