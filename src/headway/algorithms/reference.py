"""A model behind HTTP that is asked for the logprobs of given tokens: ours or vLLM's, few at a time, with retries."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from headway.config.algorithms import ReferenceSettings
from headway.core.errors import HeadwayError
from headway.core.protocol import GenerateRequest, SamplingParams

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0
_RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})


class ReferenceModel:
    """Logprobs of whole sequences. At most `concurrency` calls at a time; failed ones are tried again after a pause."""

    def __init__(
        self,
        settings: ReferenceSettings,
        *,
        engines: Callable[[], list[str]] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`engines` replaces the settings' address by whichever engine is best at the time of a call."""
        self._settings = settings
        self._engines = engines or (lambda: [settings.base_url])
        self._sleep = sleep
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Entry t is log p(token t | tokens before it); entry 0 is 0. Raises HeadwayError after the last retry."""
        sampling = SamplingParams(temperature=temperature, max_tokens=1, prompt_logprobs=0)
        request = GenerateRequest(list(token_ids), self._settings.model, sampling)
        async with self._slots:
            return await self._ask(msgspec.json.encode(request), request.token_ids)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, body: bytes, token_ids: list[int]) -> list[float]:
        failure = "no engine serves it"
        for attempt in range(self._settings.retries + 1):
            if attempt:
                await self._sleep(min(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), LONGEST_PAUSE_SECONDS))
            engines = self._engines()
            if not engines:
                continue
            url = engines[attempt % len(engines)].rstrip("/") + "/inference/v1/generate"
            try:
                status, reply = await self._post(url, body)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                failure = f"{url}: {str(error) or type(error).__name__}"
                continue
            if status == 200:
                return parse_prompt_logprobs(reply, token_ids, url)
            failure = f"{url}: {status}: {reply[:300].decode(errors='replace')}"
            if status not in _RETRYABLE:
                break
        raise HeadwayError(f"the reference model {self._settings.model!r} gave no logprobs: {failure}")

    async def _post(self, url: str, body: bytes) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._settings.timeout),
                connector=aiohttp.TCPConnector(limit=0),
                headers={"Content-Type": "application/json"},
            )
        async with self._session.post(url, data=body) as reply:
            return reply.status, await reply.read()


def parse_prompt_logprobs(reply: bytes, token_ids: Sequence[int], where: str) -> list[float]:
    """Both shapes of `prompt_logprobs`: a list of {token_id, logprob}, or vLLM's of {token id: {logprob}}."""
    try:
        entries = msgspec.json.decode(reply)["prompt_logprobs"]
        values = [_logprob(entry, token) for entry, token in zip(entries, token_ids, strict=True)]
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise HeadwayError(f"{where}: a reply without readable prompt_logprobs ({error})") from None
    if values:
        values[0] = 0.0
    return values


def _logprob(entry: Any, token: int) -> float:
    if entry is None:
        return 0.0
    if "logprob" in entry:
        if entry.get("token_id", token) != token:
            raise ValueError(f"asked for token {token}, got {entry['token_id']}")
        return float(entry["logprob"])
    return float(entry[str(token)]["logprob"])
