"""New weights: loaded by all workers from a checked copy in host memory, or by each from the trainer's GPU; taken back
where that fails."""

import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.config.shared import TlsSettings
from headway.core.protocol import WeightUpdate
from headway.inference.engine import UpdateError
from headway.inference.vllm.worker import TensorSpan
from headway.transport.weights import make_receiver

logger = logging.getLogger(__name__)

_ALIGN = 64
_MAX_NAMED = 5


class StagedFile:
    """A whole version in memory that workers on this host can map by `path`.

    It has no name in any folder, so it is gone with the last process that uses it, however that ends.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("headway-weights")
        self._end = 0
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.spans: list[TensorSpan] = []

    def add(self, name: str, tensor: Tensor) -> None:
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        os.lseek(self._file, self._end, os.SEEK_SET)
        self.spans.append(
            TensorSpan(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self._end, len(data))
        )
        written = 0
        while written < len(data):
            written += os.write(self._file, data[written : written + mmap.PAGESIZE * 2**16])
        self._end += -(-len(data) // _ALIGN) * _ALIGN

    @property
    def bytes(self) -> int:
        return sum(span.bytes for span in self.spans)

    def close(self) -> None:
        os.close(self._file)


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


class LostError(UpdateError):
    """Neither the new weights nor the old ones could be loaded: the engine serves nothing that is known."""


class LoadedWeights:
    """The weights in the workers, and the way back to those before.

    That is a copy in host memory, where None is the checkpoint that vLLM was started with; or, on GPUs that have room
    for it, a copy in each worker. Then versions can also come straight from the trainer's GPU; and where a model's
    loaders allow it, they are loaded into that copy, beside what is served, and exchanged with it. Call `prepare`
    before the scheduler is paused and everything else while it is.
    """

    def __init__(self, llm: Any, stager: Stager) -> None:
        self._llm, self._stager = llm, stager
        self._kept_by_workers = self._loads_aside = False
        self._current: StagedFile | None = None
        self._previous: StagedFile | None = None

    async def start(self) -> None:
        self._kept_by_workers = all(await self._llm.collective_rpc("headway_keeps"))
        self._loads_aside = all(await self._llm.collective_rpc("headway_loads_aside"))

    def takes(self, update: WeightUpdate) -> bool:
        """Tell whether workers can fetch this version themselves."""
        by_workers = self._kept_by_workers and not self._stager.translates
        return by_workers and update.transport.get("type") == "shared_memory"

    async def prepare(self, update: WeightUpdate, staged: StagedFile | None) -> int | None:
        """Load a version beside what is served, where workers can; returns its bytes, or None where they can't. What is
        served stays. Raises UpdateError."""
        if not self._loads_aside:
            return None
        try:
            return await self._fetch_aside(update, staged)
        except Exception as error:
            raise UpdateError(f"version {update.version} was refused: {last_line(error)}") from error
        finally:
            if staged is not None:
                staged.close()

    async def exchange(self) -> None:
        """Serve what was prepared. Raises LostError."""
        try:
            await self._llm.collective_rpc("headway_exchange")
        except Exception as error:
            raise LostError(f"vLLM lost its weights: {last_line(error)}") from error

    async def load(self, update: WeightUpdate, staged: StagedFile | None) -> int:
        """Make a version what is served, from `staged` or fetched by workers; returns its bytes. Raises UpdateError,
        with the old weights back in place, or LostError."""
        await self._keep()
        try:
            received = await self._fetch(update, staged)
        except Exception as error:
            if staged is not None:
                staged.close()
            await self._restore()
            reason = "was refused" if staged is None else "was refused: vLLM could not load the weights"
            raise UpdateError(f"version {update.version} {reason}: {last_line(error)}") from error
        if staged is None:
            return received
        if self._kept_by_workers:
            staged.close()
        else:
            self.forget_previous()
            self._previous, self._current = self._current, staged
        return received

    async def _fetch(self, update: WeightUpdate, staged: StagedFile | None) -> int:
        """Load into all workers, from `staged` or by their own means; returns the bytes."""
        if staged is not None:
            await self._load(staged)
            return staged.bytes
        self._stager.check_model()
        return self._checked(await self._llm.collective_rpc("headway_receive", args=(msgspec.json.encode(update),)))

    async def _fetch_aside(self, update: WeightUpdate, staged: StagedFile | None) -> int:
        """Load beside what is served, part by part: tokens go on between them."""
        if staged is not None:
            await self._llm.collective_rpc("headway_load_aside", args=(staged.path, [list(s) for s in staged.spans]))
        else:
            self._stager.check_model()
            await self._llm.collective_rpc("headway_receive_aside", args=(msgspec.json.encode(update),))
        while None in (workers := await self._llm.collective_rpc("headway_load_part")):
            pass
        return self._checked(workers)

    def _checked(self, workers: list[tuple[list[tuple[str, list[int]]], int]]) -> int:
        """The bytes of what workers got. Raises HeadwayError."""
        for came, _ in workers:
            self._stager.check(came)
        return int(workers[0][1])

    async def revert(self) -> None:
        """Go back to what was served before the last load. Raises LostError."""
        if not self._kept_by_workers:
            if self._current is not None:
                self._current.close()
            self._current, self._previous = self._previous, None
        await self._restore()

    def forget_previous(self) -> None:
        """There will be no way back before the last `load`; its host memory is free."""
        if self._previous is not None:
            self._previous.close()
        self._previous = None

    def close(self) -> None:
        self.forget_previous()
        if self._current is not None:
            self._current.close()

    async def _keep(self) -> None:
        if self._kept_by_workers:
            try:
                await self._llm.collective_rpc("headway_keep")
            except Exception as error:
                raise UpdateError(f"vLLM could not set its weights aside: {last_line(error)}") from error

    async def _restore(self) -> None:
        """Serve again what is kept by workers, or else the current version."""
        try:
            if self._loads_aside:
                await self.exchange()
            elif self._kept_by_workers:
                await self._llm.collective_rpc("headway_restore")
            else:
                await self._load(self._current)
        except Exception as error:
            logger.exception("vLLM could not load the previous weights again", exc_info=error)
            raise LostError(f"vLLM lost its weights: {last_line(error)}") from error

    async def _load(self, staged: StagedFile | None) -> None:
        if staged is None:
            await self._llm.collective_rpc("headway_load_checkpoint")
        else:
            spans = [list(span) for span in staged.spans]
            await self._llm.collective_rpc("headway_load", args=(staged.path, spans))


def last_line(error: Exception) -> str:
    """The last line of an error's message, since vLLM's are tracebacks, without pydantic's link below it."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("For further information visit")]
    return lines[-1] if lines else type(error).__name__
