"""A version on its way into a worker, beside the weights that it serves.

It comes in parts. A worker computes nothing else while a part is loaded, so its tokens wait for one part at most.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from headway.inference.vllm.internals import load_tensors
from headway.inference.vllm.updates.kept import KeptWeights
from headway.inference.vllm.updates.loaded import LoadedProof
from headway.inference.vllm.updates.places import Places

PART_BYTES = 4 << 30
"""A part ends with the tensor that reaches them. On an H200 tokens wait some 25 ms for it."""


class VersionAside:
    """Loads `tensors` into the copies of `kept`, except those that were received at their `places` there. `came` are
    the names and shapes of all."""

    def __init__(
        self,
        model: nn.Module,
        kept: KeptWeights,
        proof: LoadedProof,
        tensors: Iterator[tuple[str, Tensor]],
        places: Places | None = None,
    ) -> None:
        self._model, self._kept, self._proof, self._tensors = model, kept, proof, tensors
        self._places = places or Places()
        self.came: list[tuple[str, list[int]]] = []
        self.bytes = 0
        self.whole = False

    def load_part(self) -> None:
        """Load the next part. Raises HeadwayError where the version is not whole in the end, not what was announced, or
        not what this rank holds; what is served stays."""
        if self.whole:
            return
        ended: list[bool] = []
        try:
            with self._kept.loading(self._model):
                with self._places.learning(self._part(ended)) as part:
                    load_tensors(self._model, self._proof.watch(part))
                if ended:
                    self._proof.check()
        except BaseException:
            self._places.learned(whole=False)
            raise
        if ended:
            self._places.learned(whole=True)
            self.whole = True

    def _part(self, ended: list[bool]) -> Iterator[tuple[str, Tensor]]:
        until = self.bytes + PART_BYTES
        for name, tensor in self._tensors:
            self.came.append((name, list(tensor.shape)))
            self.bytes += tensor.nbytes
            if not self._places.has(name, tensor):
                yield name, tensor
            if self.bytes >= until:
                return
        ended.append(True)
