"""What runs inside vLLM's workers: taking over staged weights, watching probes, and ending with the server.

vLLM mixes `HeadwayWorker` into its worker class (`worker_extension_cls`, one of its public points), so nothing has
to be installed or registered and nothing of vLLM is replaced. The module is imported in every worker process.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.core.processes import die_with
from headway.inference.vllm.guard import SERVER
from headway.inference.vllm.probe import StreamWatch


class Place(NamedTuple):
    """Where a tensor lies in a staged file."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    bytes: int


class HeadwayWorker(StreamWatch):
    """Methods that the server calls in all workers at once. Weights are loaded while the scheduler is paused."""

    model_config: Any
    vllm_config: Any

    def headway_load(self, path: str, places: list[list[Any]]) -> None:
        """Load the tensors of a staged file into the model, in place."""
        self._headway_reload(weights_iterator=read_staged(path, [Place(*place) for place in places]))

    def headway_load_checkpoint(self) -> None:
        """Load the weights that the engine was started with."""
        self._headway_reload()

    def _headway_reload(self, **source: Any) -> None:
        model = self.model_runner.get_model()
        with unwrapped(model) if self.vllm_config.lora_config else nullcontext():
            try:
                with quiet("vllm.model_executor.model_loader.reload", "vllm.v1.worker.gpu_model_runner"):
                    self.model_runner.reload_weights(**source)
            except Exception:
                # Leaves no layer half open, so that the next load starts from a clean slate.
                from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

                finalize_layerwise_reload(model, self.model_config)
                raise
            self.headway_pack(model)

    def headway_pack(self, model: nn.Module) -> None:
        """Pack again what vLLM packs for the CPU at the first load only.

        A head that is tied to the embedding and the experts of a mixture keep copies in the layout of their kernels.
        Reloading leaves those as they were, without an error, and the old weights go on serving.
        """
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            pack_heads(model)
            pack_experts(model)


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """Meanwhile the model has the layers of its checkpoint, which vLLM has put into others that add adapters.

    Not every vLLM finds a tensor's place through those: 0.26 does not.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    wrappers = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    for parent, name, layer in wrappers:
        setattr(parent, name, layer.base_layer)
    try:
        yield
    finally:
        for parent, name, layer in wrappers:
            setattr(parent, name, layer)


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """At every reload vLLM warns of layers that have no weights of their own, and of names that it has joined."""
    levels = {name: logging.getLogger(name).level for name in loggers}
    for name in loggers:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def read_staged(path: str, places: list[Place]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a staged file, mapped and not copied."""
    size = max(place.offset + place.bytes for place in places)
    data = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    for place in places:
        dtype: torch.dtype = getattr(torch, place.dtype)
        yield place.name, data[place.offset : place.offset + place.bytes].view(dtype).view(place.shape)


def pack_heads(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "cpu_linear") and hasattr(module, "num_embeddings"):
            method: Any = module.quant_method
            method.process_weights_after_loading(module)


def pack_experts(model: nn.Module) -> None:
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)


if os.environ.get(SERVER, str(os.getpid())) != str(os.getpid()):
    die_with(int(os.environ[SERVER]))
