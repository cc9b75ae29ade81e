"""The policy that is trained: engines sample its replies over HTTP, and every token that comes back is kept."""

import asyncio
import time
from base64 import b64decode
from collections.abc import Sequence

import aiohttp
import msgspec

from headway.core.episodes import EpisodeRequest, RoutedExperts
from headway.core.messages import Message, Messages, as_messages
from headway.core.protocol import GenerateChoice, GenerateRequest, SamplingParams
from headway.envs.policy import ContextLimit, EpisodeFailure, Policy, Tools
from headway.envs.tools import describe
from headway.envs.tree import Reply, TraceTree
from headway.rendering.base import Renderer
from headway.transport.inference import EngineError, InferenceClient

RETRY_SECONDS = 60.0
"""Seconds for which one call is retried while no engine answers."""
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0


class Engines:
    """Clients of engines by URL, over shared connections, and the context lengths of these engines."""

    def __init__(self) -> None:
        self._clients: dict[str, InferenceClient] = {}
        self._session: aiohttp.ClientSession | None = None
        self.context: dict[str, int] = {}

    def client(self, url: str) -> InferenceClient:
        if url not in self._clients:
            self._clients[url] = InferenceClient(url, session=self.session())
        return self._clients[url]

    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
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
        if self._session is not None:
            await self._session.close()


class EngineSampler:
    """Samples an episode's replies: the request's engines are tried in order of preference until one answers."""

    def __init__(self, request: EpisodeRequest, engines: Engines, stop_token_ids: Sequence[int]) -> None:
        stops = (*request.sampling.stop_token_ids, *stop_token_ids)
        self._sampling = msgspec.structs.replace(request.sampling, stop_token_ids=tuple(dict.fromkeys(stops)), n=1)
        self._request = request
        self._engines = engines
        self._calls = 0
        self.seconds = 0.0

    async def sample(self, token_ids: list[int], max_tokens: int | None, temperature: float | None) -> Reply:
        """Raises ContextLimit, or EpisodeFailure of kind "engine" when no engine answers."""
        sampling = self._params(max_tokens, temperature)
        started = time.perf_counter()
        try:
            choice = await self._retry(token_ids, sampling)
        finally:
            self.seconds += time.perf_counter() - started
        return _reply(choice, sampling.temperature, self._request.version)

    def _params(self, max_tokens: int | None, temperature: float | None) -> SamplingParams:
        sampling = self._sampling
        asked = {"max_tokens": max_tokens, "temperature": temperature}
        changes = {name: value for name, value in asked.items() if value is not None}
        if sampling.seed is not None:  # calls of one episode must not repeat each other's draws
            changes["seed"] = sampling.seed + self._calls
        self._calls += 1
        return msgspec.structs.replace(sampling, **changes) if changes else sampling

    async def _retry(self, token_ids: list[int], sampling: SamplingParams) -> GenerateChoice:
        urls = self._request.engines
        if not urls:
            raise EpisodeFailure("engine", "the episode request names no engine")
        wait, give_up, attempt = FIRST_WAIT, None, 0
        while True:
            url = urls[attempt % len(urls)]
            try:
                return await self._once(url, token_ids, sampling)
            except EngineError as error:
                if not error.retryable:
                    raise EpisodeFailure("engine", str(error)) from error
                give_up = give_up or time.monotonic() + RETRY_SECONDS
                if time.monotonic() > give_up:
                    raise EpisodeFailure("engine", f"no engine answered in {attempt + 1} attempts: {error}") from error
                attempt += 1
                if attempt % len(urls) == 0:
                    await asyncio.sleep(max(wait, error.retry_after or 0.0))
                    wait = min(2 * wait, LONGEST_WAIT)

    async def _once(self, url: str, token_ids: list[int], sampling: SamplingParams) -> GenerateChoice:
        request = self._request
        client = self._engines.client(url)
        sampling = self._fitted(token_ids, sampling, self._engines.context.get(url))
        body = GenerateRequest(token_ids, request.policy, sampling, priority=request.priority)
        try:
            response = await client.generate(body, session_id=request.episode_id)
        except EngineError as error:
            if error.status not in (400, 413, 422) or url in self._engines.context:
                raise
            if await self._engines.learn_context(url) is None:
                raise
            return await self._once(url, token_ids, sampling)
        choice = response.choices[0] if response.choices else None
        if choice is None or choice.finish_reason == "abort":
            raise EngineError(200, f"the engine at {url} aborted the reply", retryable=True)
        return choice

    def _fitted(self, token_ids: list[int], sampling: SamplingParams, context: int | None) -> SamplingParams:
        """`sampling` with no more tokens than the context has room for, where its length is known."""
        if context is None:
            return sampling
        room = context - len(token_ids)
        if room <= 0:
            raise ContextLimit(f"the conversation has {len(token_ids)} tokens; the context holds {context}")
        if sampling.max_tokens is not None and sampling.max_tokens > room:
            return msgspec.structs.replace(sampling, max_tokens=room)
        return sampling


class EnginePolicy(Policy):
    """One agent of an episode whose replies are sampled by engines."""

    def __init__(self, renderer: Renderer, sampler: EngineSampler, agent: str = "policy") -> None:
        self.tree = TraceTree(renderer, agent)
        super().__init__(self.tree.trace)
        self._renderer = renderer
        self._sampler = sampler

    async def chat(
        self, messages: Messages, tools: Tools = (), *, max_tokens: int | None = None, temperature: float | None = None
    ) -> Message:
        prompt = self.tree.prompt(as_messages(messages), [describe(tool) for tool in tools])
        reply = await self._sampler.sample(prompt.token_ids, max_tokens, temperature)
        return self.tree.record(prompt, reply)

    def another(self, name: str) -> Policy:
        return EnginePolicy(self._renderer, self._sampler, name)


def _reply(choice: GenerateChoice, temperature: float, version: int) -> Reply:
    if choice.logprobs is None or len(choice.logprobs.content) != len(choice.token_ids):
        raise EpisodeFailure("engine", "the engine sent no logprob for some of its tokens")
    experts = None
    if choice.routed_experts is not None:
        body = choice.routed_experts
        experts = RoutedExperts(b64decode(body.data), body.shape, body.start, body.dtype)
    return Reply(
        choice.token_ids,
        [entry.logprob for entry in choice.logprobs.content],
        choice.versions or [(version, len(choice.token_ids))],
        choice.finish_reason,
        temperature,
        experts,
    )
