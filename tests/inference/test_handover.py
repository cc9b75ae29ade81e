"""Prefill and decode apart: replies and logprobs are those of one engine, and only KV of equal weights moves."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from aiohttp import web
from engine_common import MOE, as_prompt, make_model, prompt, publish
from engine_serving import TOKEN, EmbeddedServer, start_server

from headway.base.errors import UsageError
from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import PlacementSettings
from headway.core.episodes import EpisodeRequest, Task
from headway.core.protocol import GenerateRequest, GenerateResponse, SamplingParams
from headway.core.routing import EngineView, rank_by_role
from headway.envs.engines.engines import Engines
from headway.envs.engines.sampler import EngineSampler
from headway.envs.tree import Reply
from headway.inference.handover.records import BlockRecords
from headway.inference.handover.tickets import Tickets
from headway.inference.handover.transfers import CLAIM_SECONDS, KvTransfer, Offers
from headway.inference.serve import check_role
from headway.inference.vllm import transfers
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.tiny_tokenizer import save_tiny_tokenizer
from headway.transport.inference import EngineError, InferenceClient

PROMPT = 90
BLOCK = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("handover")
    config = replace(MOE, vocab_size=save_tiny_tokenizer(place), max_len=512)
    save_checkpoint(make_model(config), place / "model", files_from=place)
    return place / "model"


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[dict[str, EmbeddedServer]]:
    """A server of each role."""
    servers = {}
    for role in ("both", "prefill", "decode"):
        servers[role] = start_server(folder)
        servers[role].context.role = role  # type: ignore[assignment]  # one of the three
        servers[role].context.url = servers[role].url
    yield servers
    for server in servers.values():
        server.close()


def ask(server: EmbeddedServer, tokens: list[int], count: int, **fields: Any) -> GenerateResponse:
    async def send() -> GenerateResponse:
        async with InferenceClient(server.url) as client:
            sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            return await client.generate(GenerateRequest(tokens, sampling_params=sampling, **fields))

    return asyncio.run(send())


def logprobs(reply: GenerateResponse) -> list[float]:
    assert reply.choices[0].logprobs is not None
    return [entry.logprob for entry in reply.choices[0].logprobs.content]


def test_a_fleet_of_both_roles_replies_as_one_engine_does(fleet: dict[str, EmbeddedServer]) -> None:
    apart = [fleet["prefill"].url, fleet["decode"].url]

    async def play() -> list[Reply]:
        engines = Engines()
        sampling = SamplingParams(max_tokens=24, seed=5, ignore_eos=True)

        async def sample(number: int, urls: list[str]) -> Reply:
            request = EpisodeRequest(str(number), "g", Task("t"), urls, sampling=sampling)
            asked = as_prompt(prompt(PROMPT, seed=number))
            return await EngineSampler(request, engines, ()).sample(asked, None, None)

        engines.rank(apart, [1], "policy")
        while not all(engines._reports[url].state for url in apart):  # noqa: ASYNC110 (reports come by themselves)
            await asyncio.sleep(0.01)
        replies = await asyncio.gather(*(sample(n, urls) for urls in (apart, [fleet["both"].url]) for n in range(6)))
        await engines.close()
        return replies

    before = {role: server.service.state().generated_tokens for role, server in fleet.items()}
    replies = asyncio.run(play())
    for ours, theirs in zip(replies[:6], replies[6:], strict=True):
        assert ours.token_ids == theirs.token_ids and ours.versions == theirs.versions == [(0, 24)]
        apart_by = torch.tensor(ours.logprobs) - torch.tensor(theirs.logprobs)
        assert float(apart_by.abs().max()) < 1e-6
        assert ours.routed_experts is not None and theirs.routed_experts is not None
        assert (ours.routed_experts.array() == theirs.routed_experts.array()).all()
    sampled = {role: server.service.state().generated_tokens - before[role] for role, server in fleet.items()}
    assert sampled == {"both": 6 * 24, "prefill": 6, "decode": 6 * 23}


def handed_over(fleet: dict[str, EmbeddedServer], tokens: list[int]) -> tuple[list[int], str]:
    """The prompt with its first token, and the ticket, from the prefill server."""
    reply = ask(fleet["prefill"], tokens, 8, may_migrate=True)
    assert reply.choices[0].finish_reason == "migrate" and reply.kv_ticket is not None
    return tokens + reply.choices[0].token_ids, reply.kv_ticket


def test_the_decode_engine_computes_no_block_again(fleet: dict[str, EmbeddedServer]) -> None:
    known, ticket = handed_over(fleet, prompt(PROMPT, seed=50))
    reply = ask(fleet["decode"], known, 7, kv_ticket=ticket)
    assert reply.usage.cached_tokens == PROMPT // BLOCK * BLOCK
    assert logprobs(reply) == pytest.approx(logprobs(ask(fleet["both"], known, 7)), abs=1e-6)


def test_a_prefill_server_finishes_what_nobody_else_would(fleet: dict[str, EmbeddedServer]) -> None:
    tokens = prompt(PROMPT, seed=51)
    assert len(ask(fleet["prefill"], tokens, 8).choices[0].token_ids) == 8
    known, ticket = handed_over(fleet, tokens)
    assert len(ask(fleet["prefill"], known, 7, may_migrate=True, kv_ticket=ticket).choices[0].token_ids) == 7
    assert ask(fleet["prefill"], tokens, 1, may_migrate=True).choices[0].finish_reason == "length"


def test_kv_of_other_weights_salts_and_strangers_does_not_come_along(
    fleet: dict[str, EmbeddedServer], folder: Path, tmp_path: Path
) -> None:
    known, ticket = handed_over(fleet, prompt(PROMPT, seed=52))
    assert ask(fleet["decode"], known, 4, kv_ticket=ticket, cache_salt="tenant").usage.cached_tokens == 0
    altered = ticket[:-1] + ("0" if ticket[-1] != "0" else "1")
    gone = Tickets(TOKEN).issue("http://127.0.0.1:9")
    forged = Tickets("another secret").issue(fleet["prefill"].url)
    of_vllm = Tickets(TOKEN).issue(fleet["prefill"].url, KvTransfer("key", "state", {}))
    for number, bad in enumerate((altered, gone, forged, of_vllm, "", "x.y", "\ud7ff")):
        known, _ = handed_over(fleet, prompt(PROMPT, seed=70 + number))
        assert ask(fleet["decode"], known, 4, kv_ticket=bad).usage.cached_tokens == 0

    known, ticket = handed_over(fleet, prompt(PROMPT, seed=53))
    other = make_model(replace(MOE, vocab_size=fleet["decode"].service.vocab_size, max_len=512), seed=7)
    update = publish(tmp_path, 1, other)

    async def load(server: EmbeddedServer) -> None:
        async with InferenceClient(server.url, token=TOKEN) as client:
            await client.update_weights(update)

    asyncio.run(load(fleet["decode"]))
    late = ask(fleet["decode"], known, 6, kv_ticket=ticket)
    assert late.usage.cached_tokens == 0 and late.choices[0].versions == [(1, 6)]
    asyncio.run(load(fleet["both"]))
    assert logprobs(late) == pytest.approx(logprobs(ask(fleet["both"], known, 6)), abs=1e-6)
    asyncio.run(load(fleet["prefill"]))
    known, ticket = handed_over(fleet, prompt(PROMPT, seed=53))
    assert ask(fleet["decode"], known + [5] * BLOCK, 2, kv_ticket=ticket).usage.cached_tokens >= PROMPT // BLOCK * BLOCK


def test_forged_content_is_not_used(fleet: dict[str, EmbeddedServer]) -> None:
    """A server at a signed address sends blocks of other prompts, unsealed ones, and too few bytes."""
    size = fleet["decode"].service.block_bytes
    answers = [
        b"".join(BlockRecords("another secret").seal(bytes(16), bytes(size)) for _ in range(5)),
        b"".join(BlockRecords(TOKEN).seal(bytes(16), bytes(size)) for _ in range(5)),
        b"short",
    ]

    async def play() -> None:
        async def answer(http: web.Request) -> web.Response:
            return web.Response(body=answers[-1])

        app = web.Application()
        app.router.add_post("/inference/v1/kv", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        lying = Tickets(TOKEN).issue(f"http://127.0.0.1:{runner.addresses[0][1]}")
        while answers:
            tokens = prompt(PROMPT, seed=60 + len(answers))
            reply = await asyncio.to_thread(ask, fleet["decode"], tokens, 2, kv_ticket=lying)
            assert reply.usage.cached_tokens == 0
            alone = await asyncio.to_thread(ask, fleet["both"], tokens, 2)
            assert logprobs(reply) == pytest.approx(logprobs(alone), abs=1e-6)
            answers.pop()
        await runner.cleanup()

    asyncio.run(play())


def test_blocks_are_given_for_a_ticket_of_this_server_alone(fleet: dict[str, EmbeddedServer]) -> None:
    async def send(ticket: str, names: list[str]) -> None:
        async with InferenceClient(fleet["prefill"].url) as client:
            body = {"ticket": ticket, "names": names}
            await client._call("POST", "/inference/v1/kv", dict[str, Any], body)

    for ticket in ("", Tickets("another").issue(fleet["prefill"].url), Tickets(TOKEN).issue(fleet["decode"].url)):
        with pytest.raises(EngineError, match="401"):
            asyncio.run(send(ticket, []))
    with pytest.raises(EngineError, match="hexadecimal"):
        asyncio.run(send(Tickets(TOKEN).issue(fleet["prefill"].url), ["not hex"]))


def test_roles_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="HEADWAY_TOKEN"):
        check_role(ServeSettings(inference=InferenceSettings(role="decode", engine="embedded")), None)
    with pytest.raises(ValueError, match="some must decode"):
        PlacementSettings(engines=2, prefill_engines=2)
    assert [PlacementSettings(engines=3, prefill_engines=1).role(n) for n in range(3)] == [
        "prefill",
        "decode",
        "decode",
    ]
    assert PlacementSettings(engines=3).role(0) is None


@pytest.mark.parametrize(
    ("arguments", "installed", "said"),
    [
        ({}, False, "pip install nixl"),
        ({"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}, True, "kv_transfer_config"),
        ({"data_parallel_size": 2}, True, "data_parallel_size"),
    ],
)
def test_vllm_takes_no_role_that_it_could_not_play(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], installed: bool, said: str
) -> None:
    monkeypatch.setattr(transfers, "find_spec", lambda name: object() if installed else None)
    settings = ServeSettings(inference=InferenceSettings(role="prefill", engine="vllm", vllm=arguments))
    with pytest.raises(UsageError, match=said):
        check_role(settings, TOKEN)
    if installed:
        check_role(ServeSettings(inference=InferenceSettings(role="decode", engine="vllm")), TOKEN)


def test_kv_is_claimed_once_and_in_time() -> None:
    now = 100.0
    offers = Offers(lambda: now)
    for key in "abcd":
        offers.add(key)
    assert offers.claim("a") and not offers.claim("a") and not offers.claim("unknown")
    now += CLAIM_SECONDS + 1
    assert not offers.claim("b")
    offers.add("e")
    assert offers.revoke() == ["e"] == offers.revoke() and not offers.claim("e")


def test_names_of_kv_tell_weights_tokens_and_salts_apart() -> None:
    served, tokens = (1, "f", "float32"), [1, 2, 3]
    names = {transfers.kv_name(tokens, served, "salt"), transfers.kv_name([1, 2], served, "salt")}
    names |= {transfers.kv_name(tokens, (2, "f", "float32"), "salt"), transfers.kv_name(tokens, served, None)}
    assert len(names) == 4 and transfers.kv_name(tokens, served, "salt") in names


def test_prompts_go_to_prefill_engines_and_replies_to_decode_engines() -> None:
    views = [EngineView("d1", role="decode"), EngineView("p", role="prefill"), EngineView("d2", role="decode")]

    def first(begun: bool, *engines: EngineView) -> str:
        return rank_by_role(engines, 4000, Random(0), begun=begun)[0].url

    assert first(False, *views) == "p" and first(True, *views) in ("d1", "d2")
    assert {view.url for view in rank_by_role(views, 4000, Random(0), begun=True)} == {"d1", "d2", "p"}
    assert first(True, views[1]) == "p" and first(False, views[0]) == "d1"
    # The next turn of a conversation, nearly all of which is cached where its last reply was decoded.
    assert first(False, views[1], replace(views[0], cached=3900)) == "d1"
    assert first(False, views[1], replace(views[0], cached=1000)) == "p"
