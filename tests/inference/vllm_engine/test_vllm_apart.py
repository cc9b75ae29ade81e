"""Prefill and decode apart with vLLM: two live servers, whose KV moves by NIXL over TCP, reply as one does."""

import asyncio
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine_common import as_prompt, make_model, prompt, publish
from engine_serving import TOKEN, VllmServer, start_vllm, vllm_server
from vllm_here import TOLERANCE

from headway.core.episodes import EpisodeRequest, Task
from headway.core.protocol import GenerateRequest, GenerateResponse, SamplingParams
from headway.envs.engines.engines import Engines
from headway.envs.engines.sampler import EngineSampler
from headway.envs.tree import Reply
from headway.inference.handover.tickets import Tickets
from headway.inference.handover.transfers import KvTransfer
from headway.models.checkpoints.folders import load_model
from headway.transport.inference import EngineError, InferenceClient

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("nixl") is None, reason="needs the extra nixl"),
]
Fleet = dict[str, VllmServer]


@pytest.fixture(scope="module")
def fleet(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    logs = {role: tmp_path_factory.mktemp(role) / "log" for role in ("prefill", "decode")}
    begun = {role: start_vllm(taught, log, "--inference.role", role) for role, log in logs.items()}
    try:
        yield {role: vllm_server(begun[role], taught, log) for role, log in logs.items()}
    finally:
        for process in begun.values():
            process.terminate()
            process.wait(60)


def ask(server: VllmServer, tokens: list[int], count: int, **fields: Any) -> GenerateResponse:
    async def send() -> GenerateResponse:
        async with InferenceClient(server.url) as client:
            sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            return await client.generate(GenerateRequest(tokens, sampling_params=sampling, **fields))

    return asyncio.run(send())


def logprobs(reply: GenerateResponse) -> list[float]:
    assert reply.choices[0].logprobs is not None
    return [entry.logprob for entry in reply.choices[0].logprobs.content]


def handed_over(fleet: Fleet, tokens: list[int]) -> tuple[list[int], str]:
    """The prompt with what the prefill server sampled, and its ticket."""
    reply = ask(fleet["prefill"], tokens, 8, may_migrate=True)
    assert reply.choices[0].finish_reason == "migrate" and reply.kv_ticket is not None
    return tokens + reply.choices[0].token_ids, reply.kv_ticket


def check_alone(fleet: Fleet, known: list[int], reply: GenerateResponse, *, cached: int) -> None:
    """The reply is that of one server, on as many tokens of KV as were there."""
    assert reply.usage.cached_tokens == cached
    alone = ask(fleet["prefill"], known, 7)
    assert logprobs(reply) == pytest.approx(logprobs(alone), abs=TOLERANCE)
    assert reply.choices[0].token_ids == alone.choices[0].token_ids


@pytest.mark.parametrize("length", [200, 128, 90, 1])
def test_two_servers_reply_as_one(fleet: Fleet, length: int) -> None:
    """A prompt that fills its blocks leaves a second token to the prefill server: vLLM can't pass it on otherwise."""
    tokens = prompt(length, seed=length)
    known, ticket = handed_over(fleet, tokens)
    assert len(known) - length == (2 if length == 128 else 1)
    reply = ask(fleet["decode"], known, 7, kv_ticket=ticket)
    check_alone(fleet, known, reply, cached=len(known))
    again = [*tokens, 5, 6]
    assert logprobs(ask(fleet["decode"], again, 7)) == pytest.approx(
        logprobs(ask(fleet["prefill"], again, 7)), abs=TOLERANCE
    )


def test_a_ticket_is_taken_once_and_for_its_tokens_only(fleet: Fleet) -> None:
    known, ticket = handed_over(fleet, prompt(90, seed=1))
    other = prompt(len(known), seed=2)
    check_alone(fleet, other, ask(fleet["decode"], other, 7, kv_ticket=ticket), cached=0)
    assert ask(fleet["decode"], known, 7, kv_ticket=ticket, cache_salt="tenant").usage.cached_tokens == 0
    check_alone(fleet, known, ask(fleet["decode"], known, 7, kv_ticket=ticket), cached=len(known))
    check_alone(fleet, known, ask(fleet["decode"], known, 7, kv_ticket=ticket), cached=0)

    async def claim() -> None:
        async with InferenceClient(fleet["prefill"].url) as client:
            await client._call("POST", "/inference/v1/kv", dict[str, Any], {"ticket": ticket, "names": []})

    with pytest.raises(EngineError, match="410"):
        asyncio.run(claim())


def test_nobody_is_called_for_a_stranger(fleet: Fleet) -> None:
    """Tickets that no engine of the run has signed, and one of an engine that is gone."""
    known, ticket = handed_over(fleet, prompt(90, seed=3))
    real = Tickets(TOKEN).read(ticket)
    assert real is not None and real.transfer is not None
    with socket.create_server(("127.0.0.1", 0)) as trap:
        url = f"http://127.0.0.1:{trap.getsockname()[1]}"
        params = real.transfer.params | {"remote_host": "127.0.0.1", "remote_port": trap.getsockname()[1]}
        forged = Tickets("another secret").issue(url, KvTransfer(real.transfer.key, real.transfer.state, params))
        mixed = forged.partition(".")[0] + "." + ticket.partition(".")[2]
        for bad in (forged, mixed, "", "x.y"):
            check_alone(fleet, known, ask(fleet["decode"], known, 7, kv_ticket=bad), cached=0)
        trap.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            trap.accept()
    gone = Tickets(TOKEN).issue("http://127.0.0.1:9", real.transfer)
    check_alone(fleet, known, ask(fleet["decode"], known, 7, kv_ticket=gone), cached=0)


async def load(server: VllmServer, update: Any) -> None:
    async with InferenceClient(server.url, token=TOKEN) as client:
        await client.update_weights(update)


def test_kv_of_other_weights_does_not_come_along(fleet: Fleet, tmp_path: Path) -> None:
    """The prefill server takes new weights while it holds KV for others and more prompts wait than run."""
    known, ticket = handed_over(fleet, prompt(90, seed=4))
    other = make_model(load_model(fleet["decode"].folder).config, seed=7)
    update = publish(tmp_path, 1, other)
    asyncio.run(load(fleet["decode"], update))
    late = ask(fleet["decode"], known, 7, kv_ticket=ticket)
    assert late.usage.cached_tokens == 0 and late.choices[0].versions == [(1, 7)]

    async def crowd() -> list[GenerateResponse]:
        async with InferenceClient(fleet["prefill"].url) as client:
            sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            bodies = [GenerateRequest(prompt(300, seed=n), sampling_params=sampling) for n in range(90)]
            for body in bodies[::2]:
                body.may_migrate = True
            asked = [asyncio.create_task(client.generate(body)) for body in bodies]
            while not (await client.state()).generated_tokens:  # noqa: ASYNC110 (another process samples)
                await asyncio.sleep(0.01)
            await load(fleet["prefill"], update)
            return await asyncio.gather(*asked)

    replies = asyncio.run(crowd())
    assert all(sum(count for _, count in reply.choices[0].versions) in (1, 8) for reply in replies)
    assert {version for reply in replies for version, _ in reply.choices[0].versions} <= {0, 1}
    check_alone(fleet, known, late, cached=0)
    known, ticket = handed_over(fleet, prompt(90, seed=4))
    check_alone(fleet, known, ask(fleet["decode"], known, 7, kv_ticket=ticket), cached=len(known))


def test_replies_go_on_when_the_decode_server_is_killed(fleet: Fleet) -> None:
    urls = [fleet["prefill"].url, fleet["decode"].url]

    async def play() -> list[Reply]:
        engines = Engines()
        sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

        async def sample(number: int) -> Reply:
            request = EpisodeRequest(str(number), "g", Task("t"), urls, sampling=sampling)
            return await EngineSampler(request, engines, ()).sample(as_prompt(prompt(90, seed=number)), None, None)

        engines.rank(urls, [1], "policy")
        while not all(engines._reports[url].state for url in urls):  # noqa: ASYNC110 (reports come by themselves)
            await asyncio.sleep(0.01)
        async with InferenceClient(fleet["decode"].url) as client:
            before = (await client.state()).generated_tokens
            asked = [asyncio.create_task(sample(number)) for number in range(16)]
            while (await client.state()).generated_tokens < before + 100:  # noqa: ASYNC110 (another process samples)
                await asyncio.sleep(0.01)
        fleet["decode"].process.kill()
        replies = await asyncio.gather(*asked)
        await engines.close()
        return replies

    for number, reply in enumerate(asyncio.run(play())):
        assert reply.finish_reason == "length" and len(reply.token_ids) == 40
        alone = ask(fleet["prefill"], prompt(90, seed=number), 40)
        assert reply.logprobs == pytest.approx(logprobs(alone), abs=TOLERANCE)
