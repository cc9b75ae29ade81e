"""A swarm over TLS with an authority of the run's own: orders and weights come through, and nothing does without it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from headway.base.errors import UsageError
from headway.config.shared import TlsSettings
from headway.core.episodes import Episode, EpisodeRequest, Task
from headway.core.protocol import SamplingParams
from headway.orchestrator.run import open_session
from headway.swarm.messages.api import SwarmTerms
from headway.swarm.messages.keys import SigningKey
from headway.swarm.messages.orders import RunTerms
from headway.swarm.trust.ledger import Ledger
from headway.swarm.trust.verifier import Verifier
from headway.swarm.weights.download import Downloader, Mirrors
from headway.swarm.weights.manifest import cut, make_manifest
from headway.swarm.weights.peer import Peer, SourceError
from headway.swarm.weights.relay import Relay
from headway.swarm.weights.store import ShardStore
from headway.swarm.work.client import SwarmClient
from headway.swarm.work.desk import Desk
from headway.swarm.work.service import SwarmService
from headway.swarm.work.site import swarm_tls
from headway.transport.tls import CA_FILE
from namespaces import Host, make_certificates

RUN_KEY, WORKER = SigningKey(b"r" * 32), SigningKey(b"w" * 32)
ANYWHERE = "0.0.0.0"


class NoPlayer:
    repeats = True

    async def play_again(self, request: EpisodeRequest, claimed: Episode, context: int) -> Episode:
        raise AssertionError("nothing is contributed here")


def make_service(folder: Path) -> SwarmService:
    (folder / "files").mkdir()
    (folder / "files" / "weights").write_bytes(b"w" * 2500)
    store = ShardStore(folder / "shards", RUN_KEY.public)
    manifest = make_manifest("a-run", 1, "f", folder / "files", 1000)
    store.add(msgspec.msgpack.encode(RUN_KEY.sign(manifest)))
    for index, data in enumerate(cut(folder / "files", manifest)):
        store.put(1, index, data)
    terms = RunTerms("a-run", b"s" * 32, "text", [Task("0", {})], 1, SamplingParams(max_tokens=4), 64)
    verifier = Verifier((), NoPlayer(), lambda *_: pytest.fail("nothing is contributed here"))
    desk = Desk(terms, RUN_KEY, Ledger(folder / "ledger.jsonl", RUN_KEY), verifier)
    desk.publish(1, "f")
    shown = SwarmTerms("a-run", "text", "text", {}, "auto", 64, ("float32",))
    return SwarmService(desk, RUN_KEY, shown, store, wanted=lambda: True, accept=lambda *_: None)


@asynccontextmanager
async def serving(app: web.Application, tls: TlsSettings) -> AsyncIterator[str]:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, ANYWHERE, 0, ssl_context=swarm_tls(tls, ANYWHERE)).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def authority(folder: Path) -> tuple[Path, TlsSettings]:
    made = make_certificates(folder, [Host("host", "127.0.0.1", "")])
    return made, TlsSettings(certificate=folder / "host.pem", key=folder / "host.key")


def test_orders_and_weights_come_through_tls_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, tls = authority(tmp_path / "right")
    wrong, _ = authority(tmp_path / "wrong")

    async def fetch(service: str, name: str) -> None:
        """Relay a version and fetch it through the relay, each over TLS."""
        async with open_session() as session:
            source = Peer(f"https://{service}", session, WORKER)
            relay = Relay(Mirrors.of(source, []), tmp_path / f"relay-{name}", RUN_KEY.public)
            async with serving(relay.app, tls) as address:
                await relay.downloader.fetch(1)
                mirrors = Mirrors.of(source, [Peer(f"https://{address}", session, WORKER)])
                await Downloader(mirrors, ShardStore(tmp_path / name, RUN_KEY.public)).fetch(1)
                assert mirrors.relays[0].shards == 3 and mirrors.source.shards == 0

    async def ask(url: str) -> None:
        async with open_session() as session:
            client = SwarmClient(Peer(url, session, WORKER))
            assert (await client.terms()).run == "a-run"
            order = await client.order("a-run")
            assert order is not None and order.worker == WORKER.public

    async def main() -> None:
        async with serving(make_service(tmp_path).app, tls) as service:
            monkeypatch.setenv(CA_FILE, str(right))
            await ask(f"https://{service}")
            await fetch(service, "worker")
            with pytest.raises(SourceError, match="no answer"):
                await ask(f"http://{service}")
            for ca in (str(wrong), ""):
                monkeypatch.setenv(CA_FILE, ca)
                with pytest.raises(SourceError, match="certificate"):
                    await ask(f"https://{service}")

    asyncio.run(main())


def test_nobody_serves_others_without_a_certificate() -> None:
    with pytest.raises(UsageError, match="needs a certificate"):
        swarm_tls(TlsSettings(), ANYWHERE)
    assert swarm_tls(TlsSettings(), "127.0.0.1") is None
