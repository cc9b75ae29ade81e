"""Versions fetched by the server: checked against the model's own names, and named as vLLM's loaders want them."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from headway.base.errors import HeadwayError
from headway.config.shared import TlsSettings
from headway.core.protocol import WeightUpdate
from headway.inference.errors import UpdateError
from headway.inference.vllm.updates.staged import StagedFile
from headway.transport.weights import make_receiver

_MAX_NAMED = 5
_SINKS = ".self_attn.sinks"
"""Tensors of GPT-OSS alone, whose experts and sinks vLLM 0.32 writes past the loaders that a reload goes through."""
_FUSED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
INPUTS_FIRST = ("qwen3_vl_moe",)
"""Types of models of whose experts vLLM wants (experts, inputs, outputs), as released checkpoints have them. Trainers
send, and transformers 5 writes, outputs before inputs."""
INNER_TOWERS = {"gemma3": ("vision_tower.", "vision_tower.vision_model.")}
"""Types of models of whose tower vLLM wants the names of released checkpoints: what trainers send, and transformers 5
writes, begins with the first, and released names with the second."""


def swap_sides(name: str, tensor: Tensor) -> Tensor:
    """Swap inputs and outputs of a tensor that holds the experts of a layer; others stay as they are."""
    return tensor.transpose(1, 2).contiguous() if name.endswith(_FUSED_EXPERTS) else tensor


def rename(name: str, renames: tuple[str, str] | None) -> str:
    """Let a name that begins with the first begin with the second."""
    if renames is None or not name.startswith(renames[0]):
        return name
    return renames[1] + name.removeprefix(renames[0])


class Stager:
    """Fetches updates by any transport. `expected` are the names and shapes that the model is made of; `swaps` says
    that its experts have other sides first than what is sent, `renames` how names of what is sent begin, and how those
    of the model do."""

    def __init__(
        self,
        expected: dict[str, tuple[int, ...]],
        tls: TlsSettings | None = None,
        *,
        swaps: bool = False,
        renames: tuple[str, str] | None = None,
    ) -> None:
        self._expected = expected
        self._swaps, self._renames = swaps, renames
        self.translates = swaps or renames is not None
        self._receiver = make_receiver(tls=tls)

    def check_model(self) -> None:
        """Raises UpdateError for a model whose weights vLLM cannot replace."""
        if any(name.endswith(_SINKS) for name in self._expected):
            raise UpdateError(
                "vLLM cannot take new weights of GPT-OSS while it serves: its loader leaves experts and sinks as they "
                'were; use inference.engine = "embedded", or train an adapter (model.lora)'
            )

    def weights(self, update: WeightUpdate) -> StagedFile:
        """A whole, proven version of the policy's weights. Raises UpdateError that says what was wrong."""
        self.check_model()
        staged = StagedFile()
        try:
            for name, tensor in self._receiver.receive(update):
                staged.add(rename(name, self._renames), swap_sides(name, tensor) if self._swaps else tensor)
            self.check((span.name, span.shape) for span in staged.spans)
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

    def check(self, tensors: Iterable[tuple[str, Sequence[int]]]) -> None:
        """vLLM ignores what it does not know and keeps what does not come: so the names must be the model's own.
        Raises HeadwayError."""
        came = {name: tuple(shape) for name, shape in tensors}
        missing = sorted(self._expected.keys() - came.keys())
        extra = sorted(came.keys() - self._expected.keys())
        misshapen = [
            f"{name} {came[name]}, expected {shape}"
            for name, shape in self._expected.items()
            if name in came and came[name] != shape
        ]
        found = [
            f"{len(names)} {kind}: {', '.join(names[:_MAX_NAMED])}"
            for kind, names in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
            if names
        ]
        if found:
            raise HeadwayError(f"the tensors do not fit the model ({'; '.join(found)})")
