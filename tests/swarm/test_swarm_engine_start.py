"""A worker whose engine can't start: it ends and says why, and keeps its order for the next start."""

import asyncio
from pathlib import Path

import pytest
from swarm_run import CONTEXT, make_swarm
from test_swarm_weights import RUN_KEY, serving

from headway.base.errors import HeadwayError
from headway.launch.contribute.contributor import Contributor
from headway.launch.contribute.engine import EngineStartError
from headway.launch.contribute.options import ContributeOptions
from headway.models.checkpoints.folders import read_tensors
from headway.models.tiny import resolve_model
from headway.swarm.messages.api import SwarmTerms
from headway.swarm.trust.ledger import Ledger
from headway.swarm.trust.verifier import Verifier
from headway.swarm.weights.store import ShardStore, publish_folder
from headway.swarm.weights.versions import verify_tensors, write_version
from headway.swarm.work.desk import Desk
from headway.swarm.work.service import SwarmService


def open_service(folder: Path) -> SwarmService:
    """Open the service of a run that has published the tiny model."""
    swarm, base = make_swarm(), resolve_model("tiny")
    verifier = Verifier((), swarm.player, lambda version, precision: swarm.models[precision])
    desk = Desk(swarm.terms, RUN_KEY, Ledger(folder / "ledger.jsonl", RUN_KEY), verifier)
    store = ShardStore(folder / "shards", RUN_KEY.public)
    (folder / "weights").mkdir()
    fingerprint = write_version(folder / "weights", base, 1, dict(read_tensors(base)))
    publish_folder(store, RUN_KEY, "a-run", 1, fingerprint, folder / "weights")
    desk.publish(1, fingerprint)
    terms = SwarmTerms("a-run", "reverse-text", "reverse-text", {}, "auto", CONTEXT, ("float32", "bfloat16"))
    return SwarmService(desk, RUN_KEY, terms, store, wanted=lambda: True, accept=lambda *_: None)


def fail(*_: object) -> None:
    raise HeadwayError("vLLM cannot serve this: no room")


async def work(service: SwarmService, folder: Path) -> tuple[Contributor, list[str]]:
    """Contribute until the worker ends, since its engine can't start. Return what it said, too."""
    said: list[str] = []
    async with serving(service.app) as (peer,):
        worker = Contributor(ContributeOptions(peer.url, folder, device="cpu", engine="vllm"), said.append)
        with pytest.raises(EngineStartError, match=r"vllm engine of this worker can't start: .*: no room"):
            await asyncio.wait_for(worker.run(), 60)
        return worker, said


def test_a_worker_whose_engine_cannot_start_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.launch.contribute.engine.load_engine", fail)
    service = open_service(tmp_path)
    worker, _ = asyncio.run(work(service, tmp_path / "worker"))
    (standing,) = service._desk.trust.workers.values()
    order = worker._saved_order()
    assert order is not None and set(standing.open) == {order.id}


def test_weights_that_the_disk_changed_are_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged: list[Path] = []

    def damage_once(folder: Path, fingerprint: str) -> None:
        if not damaged:
            damaged.append(folder)
            path = folder / "rank_00000.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        verify_tensors(folder, fingerprint)

    monkeypatch.setattr("headway.launch.contribute.engine.load_engine", fail)
    monkeypatch.setattr("headway.launch.contribute.engine.verify_tensors", damage_once)
    service = open_service(tmp_path)
    _, said = asyncio.run(work(service, tmp_path / "worker"))
    assert any("is given up: the weights in" in line for line in said)
    assert service.bandwidth.sent > 2 * 1_900_000
