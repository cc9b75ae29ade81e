"""Proof of the part of a version that one worker has loaded: a probe's tokens pass through all layers of all ranks, but
through few rows of the embedding and the head, and through no vision tower; and norms are copied to every rank."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from headway.base.errors import HeadwayError
from headway.inference.vllm.internals import parameter_name
from headway.transport.weights.fingerprint import Fingerprint

_PROVEN = ("embed_tokens.weight", "lm_head.weight", "norm.weight")
"""Ends of the names of tensors that vLLM keeps as they come, whole or cut into rows: those above."""
_TOWERS = ("visual.", "vision_tower.", "multi_modal_projector.")
"""Beginnings of the names of vision towers' parameters in vLLM. Norms and biases that a rank has whole are proven."""
_MAX_NAMED = 3


class LoadedProof:
    """Counts a rank's part of the tensors that are loaded, and compares it with what its model holds afterwards."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._model, self._rank = model, rank
        # Loading may put others in their places.
        self._kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.named_parameters()}
        self._parts: dict[str, tuple[int, ...]] = {}
        self._came = Fingerprint()

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass tensors on to the loader."""
        for name, tensor in tensors:
            own = parameter_name(self._model, name)
            if own in self._kinds and self._proves(own, tensor):
                self._note(own, tensor, *self._kinds[own])
            yield name, tensor

    def check(self) -> None:
        """Raises HeadwayError where the model holds something else."""
        holds, parameters = Fingerprint(), dict(self._model.named_parameters())
        for name, shape in self._parts.items():
            part = parameters[name].detach()
            for dim, size in enumerate(shape):
                part = part.narrow(dim, 0, size)
            holds.add(name, part.contiguous())
        came, held = self._came.sums(), holds.sums()
        wrong = [name for name in self._parts if came[name] != held[name]]
        if wrong:
            raise HeadwayError(f"rank {self._rank} holds other weights than came: {', '.join(wrong[:_MAX_NAMED])}")

    def _proves(self, name: str, tensor: Tensor) -> bool:
        if name.startswith(_TOWERS):
            return tensor.dim() == 1 and self._kinds[name][0] == tuple(tensor.shape)
        return name.endswith(_PROVEN)

    def _note(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        part = tensor
        for dim, (own, whole) in enumerate(zip(shape, tensor.shape, strict=True)):
            if own < whole:
                start = min(self._rank * own, whole)
                part = part.narrow(dim, start, min(own, whole - start))
        # The last rank may have padding alone.
        if part.numel():
            self._parts[name] = tuple(part.shape)
            self._came.add(name, part.to(dtype).contiguous())
            # Its memory may be reused for the next one.
            self._came.wait()
