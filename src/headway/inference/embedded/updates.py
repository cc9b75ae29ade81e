"""New weights, received beside the ones that serve and taken over between two steps, or not at all."""

from dataclasses import dataclass

from torch import Tensor

from headway.core.errors import HeadwayError
from headway.core.protocol import WeightUpdate
from headway.inference.engine import UpdateError
from headway.models.decoder import DecoderLM
from headway.models.registry import build_model
from headway.models.weights import base_parameters, load_hf_tensors
from headway.transport.weights import make_receiver


@dataclass(slots=True)
class Staged:
    """A whole, proven version that waits for its turn."""

    update: WeightUpdate
    bytes: int


class Updater:
    """Receives into a second set of buffers, which then trades places with the live one.

    The buffers stay for the next update, so that a run neither allocates nor frees weights while it serves.
    """

    def __init__(self, model: DecoderLM) -> None:
        self._live = model
        self._spare: DecoderLM | None = None
        self._receiver = make_receiver()

    def stage(self, update: WeightUpdate) -> Staged:
        """Fetch and check; the live weights are not touched. Raises UpdateError that says what was wrong."""
        if self._spare is None:
            weight = self._live.head_weight()
            self._spare = build_model(self._live.config, device=weight.device, dtype=weight.dtype, seed=None)
        counter = _Counter()
        try:
            load_hf_tensors(self._spare, (counter.count(name, t) for name, t in self._receiver.receive(update)))
        except HeadwayError as error:
            raise UpdateError(f"version {update.version} was refused: {error}") from None
        return Staged(update, counter.bytes)

    def swap(self) -> None:
        """Trade the staged weights for the live ones. Only pointers move."""
        assert self._spare is not None
        pairs = zip(base_parameters(self._live), base_parameters(self._spare), strict=True)
        for (_, live), (_, spare) in pairs:
            live.data, spare.data = spare.data, live.data

    def close(self) -> None:
        self._receiver.close()


class _Counter:
    def __init__(self) -> None:
        self.bytes = 0

    def count(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        self.bytes += tensor.numel() * tensor.element_size()
        return name, tensor
