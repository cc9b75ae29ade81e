"""The part of Headway inside vLLM's workers: it loads staged weights, watches probes, and ends with the server.

vLLM mixes `HeadwayWorker` into its worker class (`worker_extension_cls`, one of its public points), so nothing has
to be installed or registered and nothing of vLLM is replaced. The module is imported in every worker process.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from headway.core.protocol import WeightUpdate
from headway.inference.vllm.internals import (
    device_type,
    loads_aside,
    pack_experts,
    pack_heads,
    release_kv,
    reload_weights,
    without_adapter_layers,
)
from headway.inference.vllm.processes import die_with_server
from headway.inference.vllm.states import HeadWatch
from headway.inference.vllm.updates.aside import VersionAside
from headway.inference.vllm.updates.kept import KeptWeights
from headway.inference.vllm.updates.loaded import LoadedProof
from headway.inference.vllm.updates.places import Places
from headway.inference.vllm.updates.staged import TensorSpan, read_staged
from headway.inference.vllm.updates.watch import StreamWatch
from headway.transport.weights import make_receiver
from headway.transport.weights.receive import WeightReceiver


class HeadwayWorker(StreamWatch, HeadWatch):
    """Methods that the server calls in all workers at once. Weights are loaded while the scheduler is paused."""

    device: torch.device
    rank: int
    model_config: Any
    vllm_config: Any
    _headway_receiver: WeightReceiver | None = None
    _headway_kept: KeptWeights | None = None
    _headway_aside: VersionAside | None = None
    _headway_places: Places | None = None

    def headway_keeps(self) -> bool:
        """Tell whether this GPU has room for what is served, a second time: then a load can be undone in place."""
        if self._headway_kept is None and self.device.type == "cuda":
            self._headway_kept = KeptWeights.where_there_is_room(self.model_runner.get_model(), self.device)
        return self._headway_kept is not None

    def headway_keep(self) -> None:
        """Set aside what is served, for `headway_restore`."""
        model = self.model_runner.get_model()
        if self._headway_kept is None:
            self._headway_kept = KeptWeights(model)
        self._headway_kept.keep(model)

    def headway_restore(self) -> None:
        """Serve again what `headway_keep` set aside."""
        assert self._headway_kept is not None
        self._headway_kept.restore(self.model_runner.get_model())

    def headway_loads_aside(self) -> bool:
        """Tell whether new weights can be loaded beside those that are served."""
        return self.headway_keeps() and loads_aside(self.model_runner.get_model())

    def headway_exchange(self) -> None:
        """Serve what was loaded beside, and set aside what was served; a second time, the other way round."""
        assert self._headway_kept is not None
        self._headway_kept.exchange(self.model_runner.get_model())

    def headway_receive(self, update: bytes) -> tuple[list[tuple[str, list[int]]], int]:
        """Load a version from the trainer's memory straight into the model. Returns the names and shapes that came, and
        their bytes. Raises HeadwayError, with the model half loaded, where it is not whole or not what was announced.
        """
        came: list[tuple[str, list[int]]] = []
        sizes: list[int] = []

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self._headway_received(update):
                came.append((name, list(tensor.shape)))
                sizes.append(tensor.nbytes)
                yield name, tensor

        self._headway_reload(tensors())
        return came, sum(sizes)

    def headway_receive_aside(self, update: bytes) -> None:
        """Begin to load a version from the trainer's memory beside what is served: see `headway_load_part`."""
        if self._headway_places is None:
            self._headway_places = Places()
        self._headway_begin(self._headway_received(update, self._headway_places.known), self._headway_places)

    def headway_load(self, path: str, spans: list[list[Any]]) -> None:
        """Load the tensors of a staged file into the model, in place."""
        self._headway_reload(read_staged(path, [TensorSpan(*span) for span in spans]))

    def headway_load_aside(self, path: str, spans: list[list[Any]]) -> None:
        """Begin to load a staged file beside what is served: see `headway_load_part`."""
        self._headway_begin(read_staged(path, [TensorSpan(*span) for span in spans]))

    def headway_load_part(self) -> tuple[list[tuple[str, list[int]]], int] | None:
        """Load the next part of the version that was begun. Returns the names and shapes that came, and their bytes,
        once it is whole. Raises HeadwayError, with what is served as it was."""
        aside = self._headway_aside
        assert aside is not None
        with self._headway_plain(self.model_runner.get_model()):
            aside.load_part()
        return (aside.came, aside.bytes) if aside.whole else None

    def headway_load_checkpoint(self) -> None:
        """Load the weights that the engine was started with."""
        self._headway_reload()

    def headway_release(self, request_ids: list[str]) -> None:
        """Let KV go that is held for other engines."""
        release_kv(request_ids)

    def _headway_received(
        self, update: bytes, into: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        if self._headway_receiver is None:
            self._headway_receiver = make_receiver(str(self.device))
        return self._headway_receiver.receive(msgspec.json.decode(update, type=WeightUpdate), into)

    def _headway_begin(self, tensors: Iterator[tuple[str, Tensor]], places: Places | None = None) -> None:
        assert self._headway_kept is not None
        model = self.model_runner.get_model()
        with self._headway_plain(model):
            self._headway_aside = VersionAside(model, self._headway_kept, self._headway_proof(model), tensors, places)

    def _headway_plain(self, model: nn.Module) -> AbstractContextManager[None]:
        return without_adapter_layers(model) if self.vllm_config.lora_config else nullcontext()

    def _headway_proof(self, model: nn.Module) -> LoadedProof:
        return LoadedProof(model, self.rank % self.vllm_config.parallel_config.tensor_parallel_size)

    def _headway_reload(self, tensors: Iterator[tuple[str, Tensor]] | None = None) -> None:
        """Load tensors, or the checkpoint. Raises HeadwayError where this rank does not hold its part afterwards."""
        model = self.model_runner.get_model()
        with self._headway_plain(model):
            if tensors is None:
                reload_weights(self.model_runner, self.model_config)
                self.headway_pack(model)
                return
            proof = self._headway_proof(model)
            reload_weights(self.model_runner, self.model_config, weights_iterator=proof.watch(tensors))
            self.headway_pack(model)
            proof.check()

    def headway_pack(self, model: nn.Module) -> None:
        """Pack again what vLLM packs for the CPU at the first load only.

        A head that is tied to the embedding and the experts of a mixture keep copies in the layout of their kernels.
        Reloading leaves those as they were, without an error, and the old weights go on serving.
        """
        if device_type() == "cpu":
            pack_heads(model)
            pack_experts(model)


die_with_server()
