"""Engines, as a worker knows them: their clients, context lengths and reports."""

from collections.abc import Sequence
from random import Random

import aiohttp

from headway.core.prefixes import PromptNames
from headway.core.routing import rank_by_role
from headway.envs.engines.reports import EngineReport
from headway.transport.inference import EngineError, InferenceClient
from headway.transport.tls import client_context


class Engines:
    """Clients of engines by URL, over shared connections, and the context lengths of these engines. They show the
    run's `token`, by which engines with tenants know whose request it is."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self._clients: dict[str, InferenceClient] = {}
        self._session: aiohttp.ClientSession | None = None
        self.context: dict[str, int] = {}
        self._reports: dict[str, EngineReport] = {}
        self._draw = Random()

    def client(self, url: str) -> InferenceClient:
        if url not in self._clients:
            self._clients[url] = InferenceClient(url, token=self.token, session=self.session())
        return self._clients[url]

    def rank(
        self,
        urls: Sequence[str],
        token_ids: Sequence[int],
        model: str,
        names: PromptNames | None = None,
        *,
        begun: bool = False,
    ) -> list[str]:
        """Order engines for a prompt, or for a reply that has `begun`, by what they reported last; as they are while
        none has. Old reports are asked for anew meanwhile: nothing waits for them."""
        if len(urls) < 2:
            return list(urls)
        for url in urls:
            self._reports.setdefault(url, EngineReport()).refresh(self.client(url))
        if not any(self._reports[url].state for url in urls):
            return list(urls)
        views = [self._reports[url].view(url, token_ids, model, names) for url in urls]
        return [view.url for view in rank_by_role(views, len(token_ids), self._draw, begun=begun)]

    def sent(self, url: str) -> None:
        """Count a request until the engine's next report counts it."""
        if url in self._reports:
            self._reports[url].sent += 1

    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ssl=client_context())
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self._session

    async def learn_context(self, url: str) -> int | None:
        """The longest sequence that the engine at `url` takes, or None where it does not say."""
        if url not in self.context:
            try:
                self.context[url] = (await self.client(url).state()).max_model_len
            except EngineError:
                return None
        return self.context[url]

    async def close(self) -> None:
        for report in self._reports.values():
            report.close()
        if self._session is not None:
            await self._session.close()
