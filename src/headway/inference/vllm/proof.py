"""A version is served on probation: what requests get of it is held back until it is proven, or taken back."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from headway.core.protocol import WeightProbe, WeightUpdate
from headway.inference.engine import UpdateError
from headway.inference.probe import mismatch
from headway.inference.vllm.probe import serve_probe
from headway.inference.vllm.updates import LostError


class Proof:
    """`passed` is set but while a version is on probation."""

    def __init__(self, llm: Any) -> None:
        self.passed = asyncio.Event()
        self.passed.set()
        self._llm = llm
        self._serving: WeightProbe | None = None

    async def hold(self, update: WeightUpdate, take_back: Callable[[], Awaitable[None]]) -> None:
        """Let the paused scheduler go on with the weights of `update`, and see what it makes of the probe.

        Raises UpdateError after `take_back`, which stops the scheduler and brings the old weights back; LostError
        where these are not what they were.
        """
        if update.probe is None:
            self._serving = None
            return
        self.passed.clear()
        try:
            wrong = await self._wrong(update.probe)
            if wrong is None:
                self._serving = update.probe
                return
            await take_back()
            if self._serving is not None and (still := await self._wrong(self._serving)) is not None:
                raise LostError(f"vLLM lost its weights: those before version {update.version} are not back, {still}")
        finally:
            self.passed.set()
        raise UpdateError(f"version {update.version} was refused: {wrong}")

    async def _wrong(self, probe: WeightProbe) -> str | None:
        found = [mismatch(probe, served) for served in await serve_probe(self._llm, probe)]
        return next((wrong for wrong in found if wrong is not None), None)
