"""Engines that leave, die and come back under requests in flight: replies go on elsewhere, and nothing is lost."""

import asyncio
import random
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from engine_common import MOE, QWEN3, as_prompt, make_engine, make_model, prompt, training_logprobs
from engine_serving import start_server

from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import ModelSettings
from headway.core.episodes import EpisodeRequest, Task
from headway.core.protocol import (
    GenerateChunkChoice,
    GenerateRequest,
    Logprobs,
    SamplingParams,
    TokenLogprob,
    chunk_tokens,
)
from headway.envs.engines.engines import Engines
from headway.envs.engines.partial_reply import PartialReply, merge_runs
from headway.envs.engines.sampler import EngineSampler
from headway.envs.tree import Reply
from headway.inference.embedded import backpressure
from headway.inference.embedded.load import load_service
from headway.inference.embedded.scheduling.sequence import Sequence
from headway.inference.outputs import Chunk
from headway.inference.server import ServerContext, build_app
from headway.models.checkpoints.folders import load_model, save_checkpoint
from headway.models.configs.config import ModelConfig
from headway.models.tiny_tokenizer import save_tiny_tokenizer
from headway.rendering.load import load_renderer
from headway.transport.inference import EngineError, InferenceClient

REPLY, LONG = 120, 900
"""Tokens. What is lost with an engine is a part of a second: replies must take long beside that."""
PROMPT = 12


class Live:
    """A server in this event loop, at one port for all its lives."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.generated = folder, 0, 0
        inference = InferenceSettings(threads=1, max_running=64)
        self._settings = ServeSettings(model=ModelSettings(path=str(folder)), inference=inference, seq_len=1024)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.service = await asyncio.to_thread(load_service, self._settings, self.folder)
        self.context = ServerContext(load_renderer(self.folder), "model", None, self.service)
        self.runner = web.AppRunner(build_app(self.context), handler_cancellation=True, shutdown_timeout=20)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self.runner.addresses[0][1]
        await self.service.start()

    async def stop(self, *, killed: bool = False) -> None:
        """Leave as a server does on SIGTERM, or drop all connections as one does on SIGKILL. What a dead engine samples
        before this process has ended it does not count."""
        if killed:
            self.generated += self.service.state().generated_tokens
            assert self.runner.server is not None
            for connection in list(self.runner.server.connections):
                if connection.transport is not None:
                    connection.transport.close()
        else:
            self.context.leave()
        await self.runner.cleanup()
        await self.service.close()
        if not killed:
            self.generated += self.service.state().generated_tokens


def checkpoint(folder: Path, config: ModelConfig) -> Path:
    config = replace(config, vocab_size=save_tiny_tokenizer(folder), max_len=1024)
    save_checkpoint(make_model(config), folder / "model", files_from=folder)
    return folder / "model"


async def play(
    folder: Path, requests: int, leaves: int, *, killed: bool, length: int = REPLY
) -> tuple[list[Reply], int]:
    """Replies to `requests` prompts by three engines, of which one after the other stops and comes back; and all tokens
    that engines have sampled."""
    fleet = [Live(folder) for _ in range(3)]
    await asyncio.gather(*(live.start() for live in fleet))
    engines, draw = Engines(), random.Random(0)
    urls = [live.url for live in fleet]

    async def ask(number: int) -> Reply:
        sampling = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        order = urls[number % 3 :] + urls[: number % 3]
        sampler = EngineSampler(EpisodeRequest(str(number), "g", Task("t"), order, sampling=sampling), engines, ())
        return await sampler.sample(as_prompt(prompt(PROMPT, seed=number)), None, None)

    asked = [asyncio.create_task(ask(number)) for number in range(requests)]
    for leave in range(leaves):
        live = fleet[leave % 3]
        # Half of what it would have to do alone is sampled: some requests are waiting, others near their end.
        while live.service.state().generated_tokens < draw.randrange(1, requests * length // (2 * leaves)):
            if all(task.done() for task in asked):
                break
            await asyncio.sleep(0.01)
        await live.stop(killed=killed)
        await live.start()
    replies = await asyncio.gather(*asked)
    await engines.close()
    for live in fleet:
        await live.stop()
    return replies, sum(live.generated for live in fleet)


def check(folder: Path, replies: list[Reply], length: int = REPLY) -> None:
    """Every reply is the one that a single engine gives: whole, in order, with its logprobs."""
    model = load_model(folder)
    for number, reply in enumerate(replies):
        tokens = prompt(PROMPT, seed=number) + reply.token_ids
        assert len(reply.token_ids) == length and reply.finish_reason == "length"
        assert sum(count for _, count in reply.versions) == length
        own = training_logprobs(model, tokens)[PROMPT - 1 :]
        assert (own - own.new_tensor(reply.logprobs)).abs().max() < 1e-4
        if reply.routed_experts is not None:
            assert (reply.routed_experts.start, reply.routed_experts.end) == (0, len(tokens) - 1)
            assert reply.routed_experts.array().shape[0] == len(tokens) - 1


@pytest.mark.parametrize("killed", [False, True], ids=["leave", "killed"])
def test_replies_survive_engines_that_stop(tmp_path: Path, killed: bool) -> None:
    folder = checkpoint(tmp_path, MOE)
    replies, sampled = asyncio.run(play(folder, 24, 3, killed=killed))
    check(folder, replies)
    # Tokens that a dead engine had not sent yet depend on how busy this machine is: the slow test counts them.
    assert killed or sampled < 1.02 * 24 * REPLY


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["leave", "killed"])
def test_200_replies_survive_ten_stops(tmp_path: Path, killed: bool) -> None:
    folder = checkpoint(tmp_path, QWEN3)
    replies, sampled = asyncio.run(play(folder, 200, 10, killed=killed, length=LONG))
    check(folder, replies, LONG)
    wasted = sampled / (200 * LONG) - 1
    print(f"wasted {wasted:.2%}")
    assert wasted < (0.10 if killed else 0.02), wasted


def test_a_short_reply_comes_in_smaller_parts_than_a_long_one() -> None:
    engine = make_engine(make_model(QWEN3), max_model_len=256)
    asked = GenerateRequest(prompt(8), sampling_params=SamplingParams(max_tokens=200, ignore_eos=True))
    asked.stream, asked.stream_interval = True, 8
    engine.add(asked, "long")
    sizes = []
    while engine.active:
        sizes += [len(item.token_ids) for _, item in engine.step() if isinstance(item, Chunk)]
    assert sizes == [4] * 32 + [8] * 9
    asked.stream_seconds = 60.0
    engine.add(asked, "seldom")
    sizes = []
    while engine.active:
        sizes += [len(item.token_ids) for _, item in engine.step() if isinstance(item, Chunk)]
    assert sizes == [4, 196]
    assert [chunk_tokens(1, sent) for sent in (0, 500)] == [1, 1]


def test_parts_come_less_often_where_many_sequences_run() -> None:
    sequence = Sequence("r", 0, (0, 0, 0), list(range(20)), 10, SamplingParams(), 0, 100, frozenset(), streamed=True)
    sequence.stream_seconds, sequence.emitted_at = 0.05, 1.0
    assert sequence.chunk_is_due(1.06, running=100)
    assert not sequence.chunk_is_due(1.06, running=512) and sequence.chunk_is_due(1.21, running=512)
    sequence.stream_seconds = 0.0
    assert sequence.chunk_is_due(1.0, running=512)


def test_a_leaving_server_answers_with_what_it_has_and_takes_nothing_new(tmp_path: Path) -> None:
    live = start_server(checkpoint(tmp_path, QWEN3))
    try:

        async def ask() -> None:
            async with InferenceClient(live.url) as client:
                asked = GenerateRequest(prompt(8), may_migrate=True)
                asked.sampling_params = SamplingParams(max_tokens=400, ignore_eos=True)
                task = asyncio.create_task(client.generate(asked))
                while not (await client.state()).generated_tokens:  # noqa: ASYNC110 (another thread samples)
                    await asyncio.sleep(0.01)
                live._loop.call_soon_threadsafe(live.context.leave)
                choice = (await task).choices[0]
                assert choice.finish_reason == "migrate" and 0 < len(choice.token_ids) < 400
                assert choice.logprobs is not None and len(choice.logprobs.content) == len(choice.token_ids)
                assert not await client.health()
                with pytest.raises(EngineError, match="stopping") as refused:
                    await client.generate(asked)
                assert refused.value.retryable

        asyncio.run(ask())
    finally:
        live.close()


def chunk(tokens: list[int], versions: list[tuple[int, int]], finish: str | None = None) -> GenerateChunkChoice:
    logprobs = Logprobs([TokenLogprob("", token, -float(token)) for token in tokens])
    return msgspec.convert(
        {
            "index": 0,
            "token_ids": tokens,
            "finish_reason": finish,
            "logprobs": msgspec.to_builtins(logprobs),
            "versions": versions,
        },
        GenerateChunkChoice,
    )


def test_parts_of_a_reply_add_up_and_aborted_ones_do_not_count() -> None:
    reply = PartialReply()
    reply.begin()
    reply.extend(chunk([1, 2], [(4, 2)]), 0)
    reply.extend(chunk([3], [(4, 2), (5, 1)], "migrate"), 0)
    assert reply.finish_reason is None
    reply.begin()
    reply.extend(chunk([9], [(5, 1)]), 0)
    reply.undo()
    reply.begin()
    reply.extend(chunk([4, 5], [(5, 1), (6, 1)], "stop"), 0)
    assert (reply.token_ids, reply.versions, reply.finish_reason) == ([1, 2, 3, 4, 5], [(4, 2), (5, 2), (6, 1)], "stop")
    assert reply.logprobs == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert merge_runs([(1, 2)], [(1, 0)]) == [(1, 2)]
    with pytest.raises(ValueError, match="no logprob"):
        reply.extend(GenerateChunkChoice(0, [7]), 0)


class ScriptedSampler(EngineSampler):
    """Engines by script: the first dies after three tokens, the second cannot continue shaped replies."""

    bodies: list[GenerateRequest]

    async def _stream(self, url: str, body: GenerateRequest, reply: PartialReply) -> None:
        self.bodies = [*getattr(self, "bodies", ()), body]
        reply.begin()
        if len(self.bodies) == 1:
            reply.extend(chunk([1, 2, 3], [(4, 3)]), 0)
            raise EngineError(0, "it died", retryable=True)
        if body.begun:
            raise EngineError(409, "send the prompt alone", retryable=False, param="begun")
        reply.extend(chunk([7, 8], [(5, 2)], "stop"), 0)


@pytest.mark.parametrize("shaped", [True, False])
def test_a_shaped_reply_says_how_much_of_it_there_is_and_starts_anew_where_that_is_refused(shaped: bool) -> None:
    sampling = SamplingParams(max_tokens=9, frequency_penalty=0.5 if shaped else 0.0)
    request = EpisodeRequest("e", "g", Task("0", {}), ["http://a", "http://b"], sampling=sampling)
    engines = Engines()
    sampler = ScriptedSampler(request, engines, [])

    async def main() -> Reply:
        try:
            return await sampler.sample(as_prompt([5, 6]), None, None)
        finally:
            await engines.close()

    reply = asyncio.run(main())
    asked = [(list(body.token_ids), body.begun, body.sampling_params.max_tokens) for body in sampler.bodies]
    if shaped:
        assert asked == [([5, 6], 0, 9), ([5, 6, 1, 2, 3], 3, 6), ([5, 6], 0, 9)]
        assert (reply.token_ids, reply.versions) == ([7, 8], [(5, 2)])
    else:
        assert asked == [([5, 6], 0, 9), ([5, 6, 1, 2, 3], 0, 6)]
        assert (reply.token_ids, reply.versions) == ([1, 2, 3, 7, 8], [(4, 3), (5, 2)])


def test_an_engine_waits_for_a_loop_that_is_late_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backpressure, "_LATE_SECONDS", -1.0)
    monkeypatch.setattr(backpressure, "_MOST_SECONDS", 60.0)
    pressure = backpressure.Backpressure()
    pressure.send()
    pressure.send()
    third = threading.Thread(target=pressure.send, daemon=True)
    third.start()
    third.join(0.1)
    assert third.is_alive()
    pressure.arrived()
    third.join(60)
    assert not third.is_alive()
    monkeypatch.setattr(backpressure, "_MOST_SECONDS", 0.01)
    pressure.send()
    monkeypatch.setattr(backpressure, "_MOST_SECONDS", 60.0)
    monkeypatch.setattr(backpressure, "_LATE_SECONDS", 3600.0)
    pressure.send()
