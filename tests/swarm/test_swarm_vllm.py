"""A swarm whose contributors sample with both engines and in both precisions; the one with vLLM lies at the end."""

import asyncio
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from swarm_run import CONTEXT, Swarm, make_swarm

from headway.base.errors import UsageError
from headway.core.episodes import Episode, EpisodeRequest
from headway.envs.tree import Prompt, Reply
from headway.launch.contribute.contributor import Contributor
from headway.launch.contribute.options import ContributeOptions
from headway.models.checkpoints.tensors import hf_tensors
from headway.models.decoder import DecoderLM
from headway.models.tiny import resolve_model
from headway.swarm.messages.api import SwarmTerms
from headway.swarm.messages.keys import SigningKey
from headway.swarm.messages.orders import WorkOrder
from headway.swarm.trust.checks.form import Form
from headway.swarm.trust.checks.termination import Termination
from headway.swarm.trust.ledger import Ledger
from headway.swarm.trust.play import Answer
from headway.swarm.trust.verifier import Verifier
from headway.swarm.weights.store import ShardStore, publish_folder
from headway.swarm.weights.versions import write_version
from headway.swarm.work.desk import Desk
from headway.swarm.work.fulfil import fulfil
from headway.swarm.work.service import SwarmService

RUN_KEY = SigningKey(b"r" * 32)
HONEST = 3
"""Contributions of each worker before the one with vLLM lies."""
CPU: dict[str, Any] = {"device": "cpu", "threads": 1}
WORKERS: dict[str, dict[str, Any]] = {
    "float32": {**CPU, "dtype": "float32"},
    "bfloat16": {**CPU, "dtype": "bfloat16"},
    "vllm": {**CPU, "dtype": "float32", "engine": "vllm"},
}


class Weights(NamedTuple):
    """A version's folder and the fingerprint of its tensors."""

    folder: Path
    fingerprint: str


def write_model(folder: Path, model: DecoderLM) -> Weights:
    folder.mkdir()
    return Weights(folder, write_version(folder, resolve_model("tiny"), 1, dict(hf_tensors(model))))


@dataclass
class Verdicts:
    """Lines that a contributor shows for each of its contributions."""

    lines: list[str] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, line: str) -> None:
        if line.startswith("version 1"):
            self.lines.append(line)
            self.arrived.set()

    async def until(self, count: int) -> None:
        while len(self.lines) < count:
            self.arrived.clear()
            await self.arrived.wait()


class Liar(Contributor):
    """Honest for a while; then it edits tokens with care, and then samples with other weights."""

    swarm: Swarm
    other: Weights
    fulfilled = 0

    async def _prepare(self, order: WorkOrder, *arguments: object) -> None:
        await super()._prepare(order, *arguments)  # type: ignore[arg-type]
        if self.fulfilled == HONEST + 1:
            await self._engine.serve(self.other.folder, 1, self.other.fingerprint)

    async def _play(self, order: WorkOrder) -> list[Episode]:
        episodes = await super()._play(order)
        self.fulfilled += 1
        return await self._edit(order, episodes) if self.fulfilled == HONEST + 1 else episodes

    async def _edit(self, order: WorkOrder, episodes: list[Episode]) -> list[Episode]:
        """Change a token of each reply, and claim the reward and the logprobs that the new reply has."""
        worker = self.swarm.workers["float32"]
        replies: dict[str, Reply] = {episode.id: worker._edited(episode) for episode in episodes}

        def answer_for(request: EpisodeRequest) -> Answer:
            def answer(_: Prompt) -> Reply:
                return replies[request.episode_id]

            return answer

        return worker.with_right_logprobs(order, await fulfil(order, self.swarm.player, answer_for, "float32")).episodes


async def contribute(worker: Contributor, verdicts: Verdicts, count: int) -> list[str]:
    """Let a worker contribute until it was judged so many times. Return the verdicts."""
    running, judged = asyncio.create_task(worker.run()), asyncio.create_task(verdicts.until(count))
    await asyncio.wait([running, judged], return_when=asyncio.FIRST_COMPLETED)
    if not judged.done():
        await running  # it has failed
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return verdicts.lines[:count]


async def contribute_all(swarm: Swarm, service: SwarmService, folder: Path, other: Weights) -> list[list[str]]:
    runner = web.AppRunner(service.app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    work = []
    for name, options in WORKERS.items():
        verdicts, liar = Verdicts(), name == "vllm"
        worker = (Liar if liar else Contributor)(ContributeOptions(url, folder / name, **options), verdicts.say)
        if isinstance(worker, Liar):
            worker.swarm, worker.other = swarm, other
        work.append(contribute(worker, verdicts, HONEST + 2 * liar))
    try:
        return await asyncio.gather(*work)
    finally:
        await runner.cleanup()


def test_vllm_computes_in_float32_alone() -> None:
    assert ContributeOptions("", Path(), device="cuda", engine="vllm").precision == "float32"
    with pytest.raises(UsageError, match="vLLM samples in bfloat16"):
        ContributeOptions("", Path(), dtype="bfloat16", engine="vllm")


def judge_all(folder: Path) -> list[list[str]]:
    """Let all workers contribute to a service of their own. Return the verdicts on each."""
    swarm = make_swarm()
    weights = write_model(folder / "weights", swarm.models["float32"])
    other = write_model(folder / "other", swarm.workers["float32"].models["other"])
    light = (Form(swarm.vocab_size, swarm.width), Termination(swarm.stops))
    verifier = Verifier(light, swarm.player, lambda version, precision: swarm.models[precision])
    desk = Desk(swarm.terms, RUN_KEY, Ledger(folder / "ledger.jsonl", RUN_KEY), verifier)
    store = ShardStore(folder / "shards", RUN_KEY.public)
    publish_folder(store, RUN_KEY, "a-run", 1, weights.fingerprint, weights.folder)
    desk.publish(1, weights.fingerprint)
    env = ("reverse-text", "reverse-text", {"num_tasks": 64})
    terms = SwarmTerms("a-run", *env, "auto", CONTEXT, ("float32", "bfloat16"))
    service = SwarmService(desk, RUN_KEY, terms, store, wanted=lambda: True, accept=lambda *_: None)
    return asyncio.run(contribute_all(swarm, service, folder, other))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_contributes_beside_the_embedded_engine_and_its_lies_are_refused(tmp_path: Path) -> None:
    # In a process of its own, as a contributor is: vLLM does not start in every one that has run other tests.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        *honest, (*before, edited, sampled_elsewhere) = pool.submit(judge_all, tmp_path).result()
    assert "refused by draws" in edited and "refused by logprobs" in sampled_elsewhere
    assert all(": accepted;" in line for lines in (*honest, before) for line in lines), (honest, before)
