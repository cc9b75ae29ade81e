"""The part of Headway inside vLLM's workers: it loads staged weights, watches probes, and ends with the server.

vLLM mixes `HeadwayWorker` into its worker class (`worker_extension_cls`, one of its public points), so nothing has
to be installed or registered and nothing of vLLM is replaced. The module is imported in every worker process.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.inference.vllm.internals import (
    device_type,
    pack_experts,
    pack_heads,
    reload_weights,
    without_adapter_layers,
)
from headway.inference.vllm.processes import die_with_server
from headway.inference.vllm.watch import StreamWatch


class TensorSpan(NamedTuple):
    """A tensor and the bytes of a staged file that hold it."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    bytes: int


class HeadwayWorker(StreamWatch):
    """Methods that the server calls in all workers at once. Weights are loaded while the scheduler is paused."""

    model_config: Any
    vllm_config: Any

    def headway_load(self, path: str, spans: list[list[Any]]) -> None:
        """Load the tensors of a staged file into the model, in place."""
        self._headway_reload(weights_iterator=read_staged(path, [TensorSpan(*span) for span in spans]))

    def headway_load_checkpoint(self) -> None:
        """Load the weights that the engine was started with."""
        self._headway_reload()

    def _headway_reload(self, **source: Any) -> None:
        model = self.model_runner.get_model()
        with without_adapter_layers(model) if self.vllm_config.lora_config else nullcontext():
            reload_weights(self.model_runner, self.model_config, **source)
            self.headway_pack(model)

    def headway_pack(self, model: nn.Module) -> None:
        """Pack again what vLLM packs for the CPU at the first load only.

        A head that is tied to the embedding and the experts of a mixture keep copies in the layout of their kernels.
        Reloading leaves those as they were, without an error, and the old weights go on serving.
        """
        if device_type() == "cpu":
            pack_heads(model)
            pack_experts(model)


def read_staged(path: str, spans: list[TensorSpan]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a staged file, mapped and not copied."""
    size = max(span.offset + span.bytes for span in spans)
    data = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    for span in spans:
        dtype: torch.dtype = getattr(torch, span.dtype)
        yield span.name, data[span.offset : span.offset + span.bytes].view(dtype).view(span.shape)


die_with_server()
