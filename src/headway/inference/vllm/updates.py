"""Taking a staged version over in all workers, and going back where that fails."""

import logging
from typing import Any

from headway.inference.engine import UpdateError
from headway.inference.vllm.staging import StagedFile

logger = logging.getLogger("headway.inference")


class LostError(UpdateError):
    """Neither the new weights nor the old ones could be loaded: the engine serves nothing that is known."""


class Weights:
    """What the workers hold, in host memory too, so that there is a way back.

    None is the checkpoint that vLLM was started with. Call everything while the scheduler is paused.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._current: StagedFile | None = None
        self._previous: StagedFile | None = None

    async def load(self, staged: StagedFile) -> None:
        """Make `staged` what is served. Raises UpdateError with the old weights back in place, or LostError."""
        try:
            await self._load(staged)
        except Exception as error:
            staged.close()
            await self._reload(self._current)
            raise UpdateError(f"vLLM could not load the weights: {_last_line(error)}") from error
        self.forget_previous()
        self._previous, self._current = self._current, staged

    async def revert(self) -> None:
        """Go back to what was served before the last `load`. Raises LostError."""
        await self._reload(self._previous)
        if self._current is not None:
            self._current.close()
        self._current, self._previous = self._previous, None

    def forget_previous(self) -> None:
        """There will be no way back before the last `load`; its memory is free."""
        if self._previous is not None:
            self._previous.close()
        self._previous = None

    def close(self) -> None:
        self.forget_previous()
        if self._current is not None:
            self._current.close()

    async def _reload(self, staged: StagedFile | None) -> None:
        try:
            await self._load(staged)
        except Exception as error:
            logger.exception("the old weights could not be loaded again", exc_info=error)
            raise LostError(f"vLLM lost its weights: {_last_line(error)}") from error

    async def _load(self, staged: StagedFile | None) -> None:
        if staged is None:
            await self._llm.collective_rpc("headway_load_checkpoint")
        else:
            await self._llm.collective_rpc("headway_load", args=(staged.path, [list(place) for place in staged.places]))


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
