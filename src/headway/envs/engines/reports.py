"""Reports of engines about themselves, by which a worker routes its requests."""

import asyncio
import time
from collections.abc import Sequence

from headway.core.prefixes import PromptNames
from headway.core.protocol import EngineState
from headway.core.routing import EngineView, Role
from headway.transport.inference import EngineError, InferenceClient

REPORT_SECONDS = 1.0
"""Age from which on a report is asked for anew."""


class EngineReport:
    """The last report of one engine. `sent` counts the requests that were sent to it since; `rate` is the tokens per
    second of one sequence when some were last seen to run. An engine that does not answer has no `state`."""

    def __init__(self) -> None:
        self.state: EngineState | None = None
        self.sent = 0
        self.role: Role = "both"
        self.rate = 0.0
        self._asked_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def refresh(self, client: InferenceClient) -> None:
        """Ask for a report in the background, unless the last is recent enough."""
        if time.monotonic() - self._asked_at >= REPORT_SECONDS and (self._task is None or self._task.done()):
            self._asked_at = time.monotonic()
            self._task = asyncio.get_running_loop().create_task(self._ask(client))

    async def _ask(self, client: InferenceClient) -> None:
        try:
            self.take(await client.state(prefixes=True))
        except EngineError:
            self.state = None

    def take(self, state: EngineState) -> None:
        self.state, self.sent, self.role = state, 0, state.role
        if state.running and state.tokens_per_second:
            self.rate = state.tokens_per_second / state.running

    def view(self, url: str, token_ids: Sequence[int], model: str, names: PromptNames | None = None) -> EngineView:
        """The engine as it looks for a prompt. One that does not answer seems to have an endless line."""
        state = self.state
        if state is None:
            return EngineView(url, waiting=_ENDLESS, role=self.role)
        cached = 0 if state.prefixes is None else state.prefixes.count_cached(token_ids, model, names)
        return EngineView(url, state.running, state.waiting, self.sent, self.rate, cached, state.role)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


_ENDLESS = 1 << 20
