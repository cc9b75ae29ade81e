"""A policy behind a plain chat API: for evaluating any OpenAI-compatible endpoint. Keeps messages, not tokens."""

import asyncio
import os
import time
from typing import Any

import aiohttp
import msgspec

from headway.core.episodes import EpisodeRequest, Node, Trace
from headway.core.messages import Message, Messages, as_messages
from headway.envs.failures import EpisodeFailure
from headway.envs.policy import Policy, Tools
from headway.envs.tools import describe

RETRIES = 5
KEY = "OPENAI_API_KEY"
"""The environment variable that holds the endpoint's key, where it wants one."""


class ChatEndpoint:
    """Asks one endpoint for the replies of an episode; failures that may pass are tried again."""

    def __init__(self, request: EpisodeRequest, session: aiohttp.ClientSession) -> None:
        base = request.engines[0].rstrip("/")
        self._url = f"{base}/chat/completions" if base.endswith("/v1") else f"{base}/v1/chat/completions"
        self._request, self._session = request, session
        self.seconds = 0.0

    async def reply(self, body: dict[str, Any]) -> tuple[Message, str]:
        """The message and why it ended. Raises EpisodeFailure of kind "engine"."""
        started = time.perf_counter()
        try:
            answer = await self._persist(self._params() | body)
            choice = answer["choices"][0]
            return Message.from_openai(choice["message"]), str(choice.get("finish_reason"))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EpisodeFailure("engine", f"{self._url} sent no chat completion ({error!r})") from error
        finally:
            self.seconds += time.perf_counter() - started

    def _params(self) -> dict[str, Any]:
        sampling = self._request.sampling
        params = {"model": self._request.policy, "temperature": sampling.temperature, "top_p": sampling.top_p}
        optional = {"max_tokens": sampling.max_tokens, "seed": sampling.seed}
        return params | {name: value for name, value in optional.items() if value is not None}

    async def _persist(self, body: dict[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if KEY in os.environ else {}
        problem = ""
        for attempt in range(RETRIES):
            try:
                async with self._session.post(self._url, json=body, headers=headers) as response:
                    data = await response.read()
                    if response.status == 200:
                        return msgspec.json.decode(data)
                    problem = f"{response.status}: {data[:300].decode(errors='replace')}"
                    if response.status not in (408, 409, 429) and response.status < 500:
                        break
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
            await asyncio.sleep(0.5 * 2**attempt)
        raise EpisodeFailure("engine", f"{self._url} answered {problem}")


class ChatPolicy(Policy):
    """One agent of an episode whose replies come from a chat endpoint. Its nodes hold messages without tokens."""

    def __init__(self, endpoint: ChatEndpoint, agent: str = "policy") -> None:
        super().__init__(Trace(agent))
        self._endpoint = endpoint

    async def chat(
        self, messages: Messages, tools: Tools = (), *, max_tokens: int | None = None, temperature: float | None = None
    ) -> Message:
        said = as_messages(messages)
        body: dict[str, Any] = {"messages": [message.to_openai() for message in said]}
        if tools:
            body["tools"] = [describe(tool).to_openai() for tool in tools]
        changes = {"max_tokens": max_tokens, "temperature": temperature}
        reply, reason = await self._endpoint.reply(body | {k: v for k, v in changes.items() if v is not None})
        self.trace.truncated |= reason == "length"
        self.trace.nodes = [Node(i - 1, [], message) for i, message in enumerate([*said, reply])]
        return reply

    def another(self, name: str) -> Policy:
        return ChatPolicy(self._endpoint, name)
