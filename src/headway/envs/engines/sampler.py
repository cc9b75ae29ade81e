"""Sampling of replies over HTTP: engines are tried in order, and every token that comes back is kept."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import msgspec

from headway.core.episodes import EpisodeRequest
from headway.core.growing import Growing
from headway.core.images import RequestImage
from headway.core.protocol import Continued, GenerateRequest, SamplingParams
from headway.core.shapes import SHAPE_FIELDS, ReplyShape
from headway.envs.engines.engines import Engines
from headway.envs.engines.partial_reply import PartialReply
from headway.envs.policy import ContextLimit, EpisodeFailure, ShapeRefused, turn_limit
from headway.envs.reply_log import ReplyLog
from headway.envs.tree import KeptBy, Prompt, Reply
from headway.transport.inference import EngineError

RETRY_SECONDS = 60.0
"""Seconds for which one call is retried while no engine answers."""
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0
STREAM_INTERVAL = 8
"""Tokens in one part of a streamed reply: an engine that dies takes no more of a reply with it."""
STREAM_SECONDS = 0.05
"""Seconds between two parts of a reply at least, since each costs CPU time of engine and worker: an engine with
hundreds of fast sequences would be held up by them, and takes no more than so many seconds of its work with it."""


class EngineSampler:
    """Samples an episode's replies: the request's engines are tried in order of preference until one answers. A reply
    whose engine leaves or dies goes on elsewhere, after the tokens that have arrived."""

    def __init__(
        self,
        request: EpisodeRequest,
        engines: Engines,
        stop_token_ids: Sequence[int],
        turn_timeout: float | None = None,
        log: ReplyLog | None = None,
    ) -> None:
        stops = (*request.sampling.stop_token_ids, *stop_token_ids)
        self._sampling = msgspec.structs.replace(request.sampling, stop_token_ids=tuple(dict.fromkeys(stops)), n=1)
        self._request = request
        self._engines = engines
        self._turn_timeout = turn_timeout
        self._calls = 0
        self._log = log or ReplyLog()
        self._images_sent: set[tuple[str, str]] = set()
        """Engines, by URL, and the digests of the images that they were sent."""
        self.seconds = 0.0

    async def sample(
        self, prompt: Prompt, max_tokens: int | None, temperature: float | None, shape: ReplyShape | None = None
    ) -> Reply:
        """Sample a reply, or give back the one that an earlier worker of the episode has sampled. Raises ContextLimit,
        ShapeRefused, or EpisodeFailure: of kind "engine" when no engine answers, of kind "timeout" when it takes too
        long, of kind "worker" when the environment does not repeat what it asked the earlier worker."""
        sampling = self._params(max_tokens, temperature, shape)
        earlier = self._log.replay(prompt)
        if earlier is not None and earlier.reply is not None:
            self.seconds += earlier.seconds
            return earlier.reply
        started = time.perf_counter()
        try:
            reply = await self._sample(prompt, sampling)
        except ContextLimit:
            self._log.add(prompt, None, 0.0)
            raise
        finally:
            self.seconds += time.perf_counter() - started
        self._log.add(prompt, reply, time.perf_counter() - started)
        return reply

    async def _sample(self, prompt: Prompt, sampling: SamplingParams) -> Reply:
        reply = PartialReply(prompt.routed)
        async with turn_limit(self._turn_timeout):
            await self._retry(prompt, sampling, reply)
        assert reply.finish_reason is not None
        return Reply(
            reply.token_ids,
            reply.logprobs,
            reply.versions,
            reply.finish_reason,
            sampling.temperature,
            reply.routed_experts,
            reply.kept_by,
        )

    def _params(
        self, max_tokens: int | None, temperature: float | None, shape: ReplyShape | None = None
    ) -> SamplingParams:
        sampling = self._sampling
        asked = {"max_tokens": max_tokens, "temperature": temperature}
        changes = {name: value for name, value in asked.items() if value is not None}
        if shape is not None:
            changes |= msgspec.structs.asdict(shape)
        if sampling.seed is not None:  # calls of one episode must not repeat each other's draws
            changes["seed"] = sampling.seed + self._calls
        self._calls += 1
        return msgspec.structs.replace(sampling, **changes) if changes else sampling

    async def _retry(self, prompt: Prompt, sampling: SamplingParams, reply: PartialReply) -> None:
        """Let one engine after the other continue `reply` until it is whole."""
        if not self._request.engines:
            raise EpisodeFailure("engine", "the episode request names no engine")
        urls = self._rank(prompt)
        wait, give_up, attempt = FIRST_WAIT, None, 0
        while True:
            url, before = urls[attempt % len(urls)], len(reply)
            try:
                await self._once(url, prompt, sampling, reply)
                if reply.finish_reason is not None:
                    return
                if reply.kv_ticket is not None:
                    urls = self._rank(prompt, begun=True)
                    attempt = 0
                    continue
                pause = 0.0
            except EngineError as error:
                if not error.retryable:
                    if error.status == 400 and error.param in SHAPE_FIELDS:
                        raise ShapeRefused(error.message, error.param) from error
                    raise EpisodeFailure("engine", str(error)) from error
                if len(reply) > before:
                    wait, give_up = FIRST_WAIT, None
                give_up = give_up or time.monotonic() + RETRY_SECONDS
                if time.monotonic() > give_up:
                    raise EpisodeFailure("engine", f"no engine answered in {attempt + 1} attempts: {error}") from error
                pause = max(wait, error.retry_after or 0.0)
            attempt += 1
            if attempt % len(urls) == 0:
                await asyncio.sleep(max(wait, pause))
                wait = min(2 * wait, LONGEST_WAIT)

    def _rank(self, prompt: Prompt, *, begun: bool = False) -> list[str]:
        request = self._request
        return self._engines.rank(request.engines, prompt.token_ids, request.policy, prompt.names, begun=begun)

    async def _once(self, url: str, prompt: Prompt, sampling: SamplingParams, reply: PartialReply) -> None:
        """Continue `reply` at the engine of `url`, until it is whole or the engine leaves. Raises EngineError; what
        came before that stays."""
        known = prompt.token_ids.extended(reply.token_ids) if len(reply) else prompt.token_ids
        kept = prompt.kept if prompt.kept_by is not None and prompt.kept_by.url == url else 0
        fitted = self._fitted(known, sampling, self._engines.context.get(url), reply)
        body = self._with_images(url, self._body(known, fitted, reply, prompt.kept_by, kept), prompt, kept)
        try:
            try:
                await self._stream(url, body, reply)
            except EngineError as error:
                self._images_sent -= {(url, image.digest) for image in body.images if image.data}
                if len(reply) and error.param == "begun":
                    reply.restart()
                    await self._once(url, prompt, sampling, reply)
                elif kept and error.param == "continues":
                    # The tokens are gone; images may still be there.
                    await self._once(url, replace(prompt, kept_by=None), sampling, reply)
                elif error.status == 409 and error.param == "images":
                    self._images_sent = {(engine, digest) for engine, digest in self._images_sent if engine != url}
                    body = self._with_images(url, self._body(known, fitted, reply), prompt, 0)
                    await self._stream(url, body, reply)
                else:
                    raise
        except EngineError as error:
            if error.status not in (400, 413, 422) or url in self._engines.context:
                raise
            if await self._engines.learn_context(url) is None:
                raise
            await self._once(url, prompt, sampling, reply)

    def _body(
        self,
        token_ids: Growing[int],
        sampling: SamplingParams,
        reply: PartialReply,
        kept_by: KeptBy | None = None,
        kept: int = 0,
    ) -> GenerateRequest:
        """The request for the rest of `reply`, without the first `kept` tokens, which the engine has."""
        return GenerateRequest(
            token_ids[kept:],
            self._request.policy,
            sampling,
            priority=self._request.priority,
            routed_experts_start=reply.routed,
            stream=True,
            stream_interval=STREAM_INTERVAL,
            stream_seconds=STREAM_SECONDS,
            may_migrate=True,
            kv_ticket=reply.kv_ticket,
            continues=Continued(kept_by.name, kept) if kept_by is not None and kept else None,
            begun=len(reply) if sampling.shaped else 0,
        )

    def _with_images(self, url: str, body: GenerateRequest, prompt: Prompt, kept: int) -> GenerateRequest:
        """Add the images after the first `kept` tokens; the bytes of those that the engine has not had from here."""
        for image in prompt.images:
            if image.at < kept:
                continue
            known = (url, image.digest) in self._images_sent
            data = b"" if known else prompt.image_bytes[image.digest]
            body.images.append(RequestImage(image.at, image.tokens, image.digest, data))
            self._images_sent.add((url, image.digest))
        return body

    async def _stream(self, url: str, body: GenerateRequest, reply: PartialReply) -> None:
        request = self._request
        reply.begin()
        self._engines.sent(url)
        chunks = self._engines.client(url).generate_stream(body, session_id=request.episode_id)
        async with aclosing(chunks):
            async for chunk in chunks:
                reply.kv_ticket = chunk.kv_ticket
                reply.kept_by = None if chunk.kept is None else KeptBy(url, chunk.kept)
                for choice in chunk.choices:
                    try:
                        reply.extend(choice, request.version)
                    except ValueError as error:
                        raise EpisodeFailure("engine", str(error)) from error
                    if choice.finish_reason == "migrate":
                        return
                    if choice.finish_reason == "abort":
                        reply.undo()
                        raise EngineError(200, f"the engine at {url} aborted the reply", retryable=True)
        if reply.finish_reason is None:
            raise EngineError(0, f"the reply from the engine at {url} broke off", retryable=True)

    def _fitted(
        self, token_ids: Growing[int], sampling: SamplingParams, context: int | None, reply: PartialReply
    ) -> SamplingParams:
        """`sampling` with as many tokens as are still to come, and no more than the context has room for, where its
        length is known."""
        wanted = None if sampling.max_tokens is None else sampling.max_tokens - len(reply)
        if context is not None:
            room = context - len(token_ids)
            if room <= 0:
                raise ContextLimit(f"the conversation has {len(token_ids)} tokens; the context holds {context}")
            wanted = wanted if wanted is None else min(wanted, room)
        return msgspec.structs.replace(sampling, max_tokens=wanted)
