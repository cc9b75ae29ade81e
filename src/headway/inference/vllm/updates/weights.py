"""New weights: loaded by all workers from a checked copy in host memory, or by each from the trainer's GPU; taken back
where that fails."""

import logging
from typing import Any

import msgspec

from headway.core.protocol import WeightUpdate
from headway.inference.errors import UpdateError
from headway.inference.vllm.updates.staged import StagedFile
from headway.inference.vllm.updates.stager import Stager

logger = logging.getLogger(__name__)


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
