"""A model behind HTTP that is asked for the logprobs of given tokens: ours or vLLM's, few at a time, with retries."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headway.base.errors import HeadwayError
from headway.config.algorithms import ReferenceSettings
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.transport.inference import EngineError, InferenceClient

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0


class ReferenceModel:
    """Logprobs of whole sequences. At most `concurrency` calls at a time; failed ones are retried after a pause."""

    def __init__(
        self,
        settings: ReferenceSettings,
        *,
        engines: Callable[[], list[str]] | None = None,
        token: str | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`engines` replaces the settings' address by whichever engine is best at the time of a call; those are
        shown the run's `token`."""
        self._settings = settings
        self._engines = engines or (lambda: [settings.base_url])
        self._token = token
        self._sleep = sleep
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._clients: dict[str, InferenceClient] = {}

    async def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Return log p(token t | tokens before it) for every t; entry 0 is 0. Raises HeadwayError after all retries."""
        sampling = SamplingParams(temperature=temperature, max_tokens=1, prompt_logprobs=0)
        request = GenerateRequest(list(token_ids), self._settings.model, sampling)
        failure = "no engine serves it"
        async with self._slots:
            for attempt in range(self._settings.retries + 1):
                if attempt:
                    await self._sleep(min(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), LONGEST_PAUSE_SECONDS))
                if not (engines := self._engines()):
                    continue
                url = engines[attempt % len(engines)]
                try:
                    return await self._ask(url, request)
                except TimeoutError:
                    failure = f"{url}: no reply in {self._settings.timeout:g} s"
                except EngineError as error:
                    failure = f"{url}: {error}"
                    if not error.retryable:
                        break
        raise HeadwayError(f"the reference model {self._settings.model!r} gave no logprobs: {failure}")

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    async def _ask(self, url: str, request: GenerateRequest) -> list[float]:
        client = self._clients.setdefault(url, InferenceClient(url, token=self._token))
        async with asyncio.timeout(self._settings.timeout):
            reply = await client.generate_raw(request)
        return parse_prompt_logprobs(reply, request.token_ids, url)


def parse_prompt_logprobs(reply: dict[str, Any], token_ids: Sequence[int], where: str) -> list[float]:
    """Read both shapes of `prompt_logprobs`: a list of {token_id, logprob}, or vLLM's of {token id: {logprob}}."""
    try:
        values = [_logprob(entry, token) for entry, token in zip(reply["prompt_logprobs"], token_ids, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise HeadwayError(f"{where}: a reply without readable prompt_logprobs ({error})") from None
    return [0.0, *values[1:]]


def _logprob(entry: Any, token: int) -> float:
    if entry is None:
        return 0.0
    if "logprob" in entry:
        if entry.get("token_id", token) != token:
            raise ValueError(f"asked for token {token}, got {entry['token_id']}")
        return float(entry["logprob"])
    return float(entry[str(token)]["logprob"])
