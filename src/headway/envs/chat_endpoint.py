"""A policy behind a plain chat API: for evaluating any OpenAI-compatible endpoint. Keeps messages, not tokens."""

import asyncio
import os
import time

import aiohttp
import msgspec

from headway.core.episodes import EpisodeRequest, Trace
from headway.core.messages import Message, Tool
from headway.core.openai.answers import read_reply
from headway.core.openai.requests import Json, chat_body
from headway.core.shapes import ReplyShape
from headway.envs.policy import EpisodeFailure, MessagePolicy, Policy, turn_limit

RETRIES = 5
KEY = "OPENAI_API_KEY"
"""The environment variable that holds the endpoint's key, where it wants one."""


class ChatClient:
    """Asks one endpoint for the replies of an episode; failures that may pass are tried again."""

    def __init__(
        self, request: EpisodeRequest, session: aiohttp.ClientSession, turn_timeout: float | None = None
    ) -> None:
        self._turn_timeout = turn_timeout
        base = request.engines[0].rstrip("/")
        self._url = f"{base}/chat/completions" if base.endswith("/v1") else f"{base}/v1/chat/completions"
        self._request, self._session = request, session
        self.seconds = 0.0

    async def reply(
        self,
        messages: list[Message],
        tools: list[Tool],
        max_tokens: int | None,
        temperature: float | None,
        shape: ReplyShape | None = None,
    ) -> tuple[Message, str]:
        """The message and why it ended. Raises EpisodeFailure of kind "engine" or "timeout"."""
        sampling = self._request.sampling
        body = chat_body(
            messages,
            tools,
            model=self._request.policy,
            temperature=sampling.temperature if temperature is None else temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens if max_tokens is None else max_tokens,
            seed=sampling.seed,
            **({} if shape is None else shape.openai_fields()),
        )
        started = time.perf_counter()
        try:
            async with turn_limit(self._turn_timeout):
                return read_reply(msgspec.json.decode(await self._retry(body)))
        except (ValueError, msgspec.DecodeError) as error:
            raise EpisodeFailure("engine", f"{self._url} sent no chat completion ({error})") from error
        finally:
            self.seconds += time.perf_counter() - started

    async def _retry(self, body: Json) -> bytes:
        headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if KEY in os.environ else {}
        problem = ""
        for attempt in range(RETRIES):
            try:
                async with self._session.post(self._url, json=body, headers=headers) as response:
                    data = await response.read()
                    if response.status == 200:
                        return data
                    problem = f"{response.status}: {data[:300].decode(errors='replace')}"
                    if response.status not in (408, 409, 429) and response.status < 500:
                        break
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
            await asyncio.sleep(0.5 * 2**attempt)
        raise EpisodeFailure("engine", f"{self._url} answered {problem}")


class ChatPolicy(MessagePolicy):
    """One agent of an episode whose replies come from a chat endpoint."""

    def __init__(self, client: ChatClient, agent: str = "policy") -> None:
        super().__init__(Trace(agent))
        self._client = client

    async def reply(
        self,
        messages: list[Message],
        tools: list[Tool],
        max_tokens: int | None,
        temperature: float | None,
        shape: ReplyShape | None,
    ) -> Message:
        message, reason = await self._client.reply(messages, tools, max_tokens, temperature, shape)
        self.trace.truncated |= reason == "length"
        return message

    def another(self, name: str) -> Policy:
        return ChatPolicy(self._client, name)
