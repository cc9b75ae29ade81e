"""New weights, received and proven in host memory before an engine is touched."""

import mmap
import os
from collections.abc import Iterable

import torch
from torch import Tensor

from headway.core.errors import HeadwayError
from headway.core.protocol import WeightUpdate
from headway.inference.engine import UpdateError
from headway.inference.vllm.worker import Place
from headway.transport.weights import make_receiver

_ALIGN = 64
_NAMED = 5


class StagedFile:
    """A whole version in memory that workers on this host can map by `path`.

    It has no name in any folder, so it is gone with the last process that uses it, however that ends.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("headway-weights")
        self._end = 0
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.places: list[Place] = []

    def add(self, name: str, tensor: Tensor) -> None:
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        os.lseek(self._file, self._end, os.SEEK_SET)
        self.places.append(
            Place(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self._end, len(data))
        )
        written = 0
        while written < len(data):
            written += os.write(self._file, data[written : written + mmap.PAGESIZE * 2**16])
        self._end += -(-len(data) // _ALIGN) * _ALIGN

    @property
    def bytes(self) -> int:
        return sum(place.bytes for place in self.places)

    def close(self) -> None:
        os.close(self._file)


class Stager:
    """Fetches updates by any transport. `expected` are the names and shapes that the model is made of."""

    def __init__(self, expected: dict[str, tuple[int, ...]]) -> None:
        self._expected = expected
        self._receiver = make_receiver()

    def weights(self, update: WeightUpdate) -> StagedFile:
        """A whole, proven version of the policy's weights. Raises UpdateError that says what was wrong."""
        staged = StagedFile()
        try:
            for name, tensor in self._receiver.receive(update):
                staged.add(name, tensor)
            self._check(staged.places)
        except BaseException as error:
            staged.close()
            if isinstance(error, HeadwayError):
                raise UpdateError(f"version {update.version} was refused: {error}") from None
            raise
        return staged

    def adapter(self, update: WeightUpdate) -> dict[str, Tensor]:
        """A whole, proven version of an adapter. Raises UpdateError."""
        try:
            return {name: tensor.clone() for name, tensor in self._receiver.receive(update)}
        except HeadwayError as error:
            raise UpdateError(f"adapter {update.adapter}, version {update.version}, was refused: {error}") from None

    def close(self) -> None:
        self._receiver.close()

    def _check(self, places: Iterable[Place]) -> None:
        """vLLM ignores what it does not know and keeps what does not come: so the names must be the model's own."""
        came = {place.name: tuple(place.shape) for place in places}
        missing = sorted(self._expected.keys() - came.keys())
        extra = sorted(came.keys() - self._expected.keys())
        misshapen = [
            f"{name} {came[name]}, expected {shape}"
            for name, shape in self._expected.items()
            if name in came and came[name] != shape
        ]
        found = [
            f"{len(names)} {kind}: {', '.join(names[:_NAMED])}"
            for kind, names in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
            if names
        ]
        if found:
            raise HeadwayError(f"the tensors do not fit the model ({'; '.join(found)})")
