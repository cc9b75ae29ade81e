"""A judge: another model that grades replies, behind OpenAI's chat API, with a cache, retries and limits.

judge = Judge("https://api.openai.com/v1", "gpt-5-mini", "Question: {question}\\nReply: {reply}\\n...", cache="judged")

@reward
async def graded(self, task, answer):
    return await self.judge.grade(question=task.data["question"], reply=answer)
"""

import asyncio
import hashlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from headway.base.errors import UsageError
from headway.base.files import write_atomic
from headway.envs.policy import EpisodeFailure

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
_AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}
"""Status codes that may be gone at the next try."""


def read_score(reply: str) -> float:
    """Read the last `Score: X` of a judge's reply, with X from 0 to 1. Raises ValueError where there is none."""
    found = re.findall(r"score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)", reply, re.IGNORECASE)
    if not found or not 0 <= float(found[-1]) <= 1:
        raise ValueError("it has no line `Score: X` with X from 0 to 1")
    return float(found[-1])


class _TryAgainError(Exception):
    """A failure that may be gone after `pause` seconds, where the server says how many."""

    def __init__(self, reason: str, pause: float | None = None) -> None:
        super().__init__(reason)
        self.pause = pause


class Judge:
    """Grades texts by asking a model. Keep one per environment; `grade` may be called by many episodes at once.

    Equal questions are asked once: at the same time, in this worker, and with a `cache` folder ever.
    """

    def __init__(
        self,
        url: str,
        model: str,
        prompt: str,
        *,
        read: Callable[[str], float] = read_score,
        key_variable: str = "OPENAI_API_KEY",
        cache: str | Path | None = None,
        concurrency: int = 16,
        retries: int = 5,
        timeout: float = 120.0,
        max_requests: int | None = None,
        max_tokens: int = 512,
        temperature: float = 0.0,
    ) -> None:
        """`prompt` has the fields of `grade` in braces. `read` turns the reply into a number or raises ValueError.

        The key comes from the environment variable `key_variable`, which workers get by `workers.pass_env`; without it
        none is sent. At most `concurrency` requests are in flight and `max_requests` are ever sent, per worker.
        """
        self._url, self._prompt, self._read = url.rstrip("/") + "/chat/completions", prompt, read
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._key_variable, self._retries, self._timeout, self._most = key_variable, retries, timeout, max_requests
        self._cache = None if cache is None else Path(cache).expanduser()
        self._slots = asyncio.Semaphore(concurrency)
        self._asked: dict[str, asyncio.Task[str]] = {}
        self._session: aiohttp.ClientSession | None = None
        self.counts: Counter[str] = Counter()
        """How many were `asked`, came from the `cache`, were tried `again`, and `failed`."""

    async def grade(self, **fields: str) -> float:
        """Return the grade of the filled-in prompt. Raises EpisodeFailure, which drops the episode, without one."""
        reply = await self.ask(self.fill(**fields))
        try:
            return float(self._read(reply))
        except ValueError as error:
            self.counts["failed"] += 1
            raise EpisodeFailure("reward", f"the judge's reply cannot be read: {error}: {reply[-200:]!r}") from error

    def fill(self, **fields: str) -> str:
        """Put fields into the prompt. Braces inside of them stay what they are."""

        def value(found: re.Match[str]) -> str:
            if found[1] not in fields:
                raise UsageError(f"the judge's prompt wants {{{found[1]}}}, but grade() got {sorted(fields)}")
            return fields[found[1]]

        return re.sub(r"\{(\w+)\}", value, self._prompt)

    async def ask(self, prompt: str) -> str:
        """Return the model's reply to a prompt."""
        body = {**self._body, "messages": [{"role": "user", "content": prompt}]}
        key = hashlib.sha256(json.dumps([self._url, body], sort_keys=True).encode()).hexdigest()
        if (known := self._cached(key)) is not None:
            self.counts["cache"] += 1
            return known
        if key not in self._asked:
            self._asked[key] = asyncio.ensure_future(self._ask(key, body))
            self._asked[key].add_done_callback(lambda _: self._asked.pop(key, None))
        # One episode that is cancelled must not cancel the others' question.
        return await asyncio.shield(self._asked[key])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _ask(self, key: str, body: dict[str, Any]) -> str:
        async with self._slots:
            for attempt in range(self._retries + 1):
                if self._most is not None and self.counts["asked"] >= self._most:
                    raise EpisodeFailure("reward", f"the judge's {self._most} requests are used up")
                self.counts["asked"] += 1
                try:
                    reply = await self._post(body)
                    break
                except (_TryAgainError, aiohttp.ClientError, TimeoutError) as error:
                    if attempt == self._retries:
                        self.counts["failed"] += 1
                        reason = str(error) or type(error).__name__
                        raise EpisodeFailure("reward", f"the judge gave no grade: {reason}") from error
                    self.counts["again"] += 1
                    pause = min(FIRST_PAUSE_SECONDS * 2**attempt, LONGEST_PAUSE_SECONDS) * random.uniform(0.5, 1.0)
                    told = error.pause if isinstance(error, _TryAgainError) else None
                    await asyncio.sleep(pause if told is None else min(told, LONGEST_PAUSE_SECONDS))
        if self._cache is not None:
            self._cache.mkdir(parents=True, exist_ok=True)
            write_atomic(self._cache / f"{key}.json", json.dumps({"reply": reply}))
        return reply

    async def _post(self, body: dict[str, Any]) -> str:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout))
        key = os.environ.get(self._key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self._session.post(self._url, json=body, headers=headers) as response:
            text = await response.text()
            if response.status in _AGAIN:
                pause = response.headers.get("Retry-After", "")
                raise _TryAgainError(f"HTTP {response.status}", float(pause) if pause.isdigit() else None)
            if response.status != 200:
                self.counts["failed"] += 1
                raise EpisodeFailure("reward", f"the judge answers HTTP {response.status}: {text[:200]}")
        try:
            return str(json.loads(text)["choices"][0]["message"]["content"] or "")
        except (ValueError, LookupError, TypeError):
            raise _TryAgainError(f"a reply that is no chat completion: {text[:200]!r}") from None

    def _cached(self, key: str) -> str | None:
        if self._cache is None:
            return None
        try:
            return str(json.loads((self._cache / f"{key}.json").read_text())["reply"])
        except (OSError, ValueError, KeyError):
            return None
