"""A small flood against the service beside an honest worker, and what nobody can read there."""

import asyncio
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "swarm_parts"))

from aiohttp import web  # noqa: E402
from swarm_flood import RUN, FloodedRun, flood, session_at, work  # noqa: E402 - lies there

from headway.swarm.messages.canonical import encode  # noqa: E402
from headway.swarm.messages.keys import SigningKey  # noqa: E402
from headway.swarm.messages.signing import authorization  # noqa: E402
from headway.swarm.weights.peer import Peer  # noqa: E402
from headway.swarm.work.client import SwarmClient  # noqa: E402
from headway.swarm.work.service import SwarmService  # noqa: E402
from headway.transport.control.tokens import TOKEN  # noqa: E402

A, B = SigningKey(b"a" * 32), SigningKey(b"b" * 32)
SECRET = "the-token-of-the-run"


@pytest.fixture(scope="module")
def run() -> FloodedRun:
    return FloodedRun()


async def start(service: SwarmService) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(service.app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def test_a_flood_leaves_no_trace_and_honest_workers_get_through(run: FloodedRun, tmp_path: Path) -> None:
    service = run.service(tmp_path)

    async def main() -> tuple[Counter[str], Counter[str]]:
        runner, url = await start(service)
        stop = asyncio.Event()
        working = asyncio.create_task(work(run, url, 0, stop))
        answers = await flood(url, 300)
        stop.set()
        honest = await working
        await runner.cleanup()
        return answers, honest

    answers, honest = asyncio.run(main())
    assert sum(answers.values()) == 300 and answers["accepted"] == 0 and answers["400"] > 100
    assert honest["accepted"] >= 1 and not any(what.startswith("refused") for what in honest)
    # Of hundreds of keys only the honest one is known, in memory and on the disk.
    known = SigningKey(b"\x01" * 32).public.hex()
    assert set(service._desk.trust.workers) == {known} and set(service.uploaded) == {known}
    workers = {line.partition('"worker":"')[2][:64] for line in (tmp_path / "ledger.jsonl").read_text().splitlines()}
    assert workers - {""} == {known}


def test_nobody_reads_the_token_or_what_others_sent(
    run: FloodedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, SECRET)
    service = run.service(tmp_path)

    async def main() -> list[tuple[str, int, bytes]]:
        runner, url = await start(service)
        seen = []
        async with session_at("127.0.0.1") as session:
            client = SwarmClient(Peer(url, session, A))
            order = await client.order(RUN)
            assert order is not None
            sent = await asyncio.to_thread(run.worker(0).honest, order)
            assert (await client.contribute(sent)).verdict.accepted
            paths = ["", "/terms", "/orders", "/standing", "/versions", "/contributions", f"/contributions/{order.id}"]
            paths += [f"/standing/{A.public.hex()}", "/versions/0/manifest", "/versions/0/shards/..%2f..%2frun.key"]
            for path in (f"/v1{path}" for path in paths):
                headers = {"Authorization": authorization(B, "GET", path)}
                async with session.get(url + path, headers=headers) as answer:
                    shown = await answer.read() + repr(answer.headers).encode()
                    seen.append((path, answer.status, shown))
            # A's own message, sent again by B, is B's no more than before.
            body = encode(A.sign(sent))
            headers = {"Authorization": authorization(B, "POST", "/v1/contributions", body)}
            async with session.post(url + "/v1/contributions", headers=headers, data=body) as answer:
                assert answer.status == 400
        await runner.cleanup()
        tokens = sent.episodes[0].traces[0].nodes[-1].message
        assert tokens is not None and tokens.content
        for path, _, shown in seen:
            assert SECRET.encode() not in shown and tokens.content.encode() not in shown, path
        return seen

    statuses = {path: status for path, status, _ in asyncio.run(main())}
    assert {path for path, status in statuses.items() if status == 200} == {"/v1/terms", "/v1/standing", "/v1/versions"}
