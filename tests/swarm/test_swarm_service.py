"""The service over HTTP: orders, uploads, standings, and who gets through."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from swarm_run import Swarm, make_swarm

from headway.core.episodes import Episode
from headway.swarm.messages.api import SwarmTerms, WorkRequest
from headway.swarm.messages.canonical import InvalidMessageError, encode
from headway.swarm.messages.keys import SigningKey
from headway.swarm.messages.signing import WINDOW_SECONDS, authorization, verify
from headway.swarm.trust.checks.form import Form
from headway.swarm.trust.checks.termination import Termination
from headway.swarm.trust.ledger import Ledger
from headway.swarm.trust.verifier import Verifier
from headway.swarm.weights.peer import CutOffError, Peer, RefusedError, SourceError
from headway.swarm.weights.store import ShardStore
from headway.swarm.work import service as service_module
from headway.swarm.work.client import SwarmClient
from headway.swarm.work.desk import Desk
from headway.swarm.work.service import SwarmService

RUN_KEY = SigningKey(b"r" * 32)
WORKER, OTHER = SigningKey(b"1" * 32), SigningKey(b"2" * 32)


@pytest.fixture(scope="module")
def swarm() -> Swarm:
    return make_swarm()


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Run:
    """A service around a desk, and what it accepted and dropped."""

    def __init__(self, swarm: Swarm, folder: Path) -> None:
        light = (Form(swarm.vocab_size, swarm.width), Termination(swarm.stops))
        verifier = Verifier(light, swarm.player, lambda version, precision: swarm.models[precision])
        self.desk = Desk(swarm.terms, RUN_KEY, Ledger(folder / "ledger.jsonl", RUN_KEY), verifier)
        self.desk.publish(1, "weights")
        self.accepted: list[tuple[str, list[Episode]]] = []
        self.wanted = True
        terms = SwarmTerms("a-run", "reverse-text", "reverse-text", {}, "auto", 128, ("float32", "bfloat16"))
        store = ShardStore(folder / "shards", RUN_KEY.public)
        self.service = SwarmService(self.desk, RUN_KEY, terms, store, wanted=lambda: self.wanted, accept=self._accept)

    def _accept(self, worker: str, contribution: object, episodes: list[Episode], dropped: object) -> None:
        self.accepted.append((worker, episodes))


@pytest.fixture
def run(swarm: Swarm, tmp_path: Path) -> Run:
    return Run(swarm, tmp_path)


ClientOf = Callable[[SigningKey], SwarmClient]


def talk(run: Run, conversation: Callable[[ClientOf], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving(run.service.app) as url, aiohttp.ClientSession() as session:
            await conversation(lambda key: SwarmClient(Peer(url, session, key)))

    asyncio.run(main())


def test_an_honest_worker_earns_and_a_liar_is_cut_off(run: Run, swarm: Swarm) -> None:
    worker = swarm.workers["float32"]

    async def conversation(client_of: ClientOf) -> None:
        client, liar = client_of(WORKER), client_of(OTHER)
        assert (await client.terms()).run == "a-run" and client.run_key == RUN_KEY.public
        order = await client.order("a-run")
        assert order is not None and order.worker == WORKER.public
        answer = await client.contribute(await asyncio.to_thread(worker.honest, order))
        assert answer.verdict.accepted and answer.tokens > 0
        again = await client.contribute(await asyncio.to_thread(worker.honest, order))
        assert not again.verdict.accepted and again.verdict.check == "order"
        for kind in ("invented_rewards", "edited_logprobs"):
            lie = await liar.order("a-run")
            assert lie is not None
            answer = await liar.contribute(await asyncio.to_thread(worker.lie, kind, lie, order))
            assert not answer.verdict.accepted
        with pytest.raises(CutOffError):
            await liar.order("a-run")
        standing = await liar.standing()
        assert standing.cut_off and standing.accepted == 0 and len(standing.refusals) == 2
        assert "reward" in standing.refusals[0] and (await client.standing()).refused == 0

    talk(run, conversation)
    assert [key for key, _ in run.accepted] == [WORKER.public.hex()] and len(run.accepted[0][1]) == 4


def test_only_signed_requests_of_bounded_size_get_through(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "LONGEST_UPLOAD", 10_000)

    async def conversation(client_of: ClientOf) -> None:
        peer = client_of(WORKER).peer
        async with peer.session.get(peer.url + "/v1/terms") as answer:
            assert answer.status == 400 and "not signed" in await answer.text()
        token = {"Authorization": "Bearer token"}
        async with peer.session.get(peer.url + "/v1/standing", headers=token) as answer:
            assert answer.status == 400
        with pytest.raises(RefusedError, match="400"):
            await peer.post("/v1/contributions", b"\x00" * (service_module.LONGEST_UPLOAD + 1))
        with pytest.raises(RefusedError, match="400"):
            await peer.post("/v1/contributions", b"no message")
        # A request that someone else signed is not one of this key.
        with pytest.raises(RefusedError, match="sent by the worker"):
            await peer.post("/v1/contributions", encode(OTHER.sign(WorkRequest("a-run"))))
        run.wanted = False
        assert await client_of(WORKER).order("a-run") is None

    talk(run, conversation)
    assert not run.desk.trust.workers


def test_uploads_wait_in_no_queue(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MOST_UPLOADS", 0)

    async def conversation(client_of: ClientOf) -> None:
        with pytest.raises(SourceError, match="503"):
            await client_of(WORKER).peer.post("/v1/contributions", b"anything")

    talk(run, conversation)


def test_a_flood_of_one_key_is_stopped_and_others_are_served(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "BURST", 20.0)
    monkeypatch.setattr(service_module, "RATE", 0.1)
    run = Run(swarm, tmp_path)

    async def conversation(client_of: ClientOf) -> None:
        flood = client_of(OTHER)
        answers = await asyncio.gather(*(flood.peer.get("/v1/versions") for _ in range(30)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, SourceError)]
        assert len(refused) == 10 and all("429" in str(error) for error in refused)
        assert (await client_of(WORKER).terms()).run == "a-run"

    talk(run, conversation)


def test_a_signature_is_of_one_request_and_one_time() -> None:
    header = authorization(WORKER, "POST", "/v1/orders", b"body", now=1000.0)
    assert verify(header, "POST", "/v1/orders", b"body", now=1000.0) == WORKER.public
    wrong = [("GET", "/v1/orders", b"body", 1000.0), ("POST", "/v1/standing", b"body", 1000.0)]
    wrong += [("POST", "/v1/orders", b"other", 1000.0), ("POST", "/v1/orders", b"body", 1002.0 + WINDOW_SECONDS)]
    for method, path, body, now in wrong:
        with pytest.raises(InvalidMessageError):
            verify(header, method, path, body, now=now)
    with pytest.raises(InvalidMessageError):
        verify(header.replace(WORKER.public.hex(), OTHER.public.hex()), "POST", "/v1/orders", b"body", now=1000.0)
