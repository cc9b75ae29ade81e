"""Contributions to a run that trains an adapter: the newest one is accepted, an older one under its name is refused."""

import asyncio
from pathlib import Path

import pytest
import torch
from swarm_run import CONTEXT, Swarm, make_swarm
from swarm_workers import stopping

from headway.config.shared import FilesystemWeights, LoraSettings
from headway.core.episodes import EpisodeRequest
from headway.core.protocol import GenerateRequest, WeightUpdate
from headway.core.runs import RunPaths
from headway.envs.tree import Prompt, Reply
from headway.launch.contribute.engine import LocalEngine
from headway.launch.contribute.options import ContributeOptions
from headway.models.adapters.lora import adapter_tensors, apply_lora
from headway.models.checkpoints.folders import load_model
from headway.models.tiny import resolve_model
from headway.swarm.messages.api import SwarmTerms
from headway.swarm.messages.orders import Contribution, WorkOrder
from headway.swarm.trust.checks.activations import Activations
from headway.swarm.trust.checks.form import Form
from headway.swarm.trust.checks.termination import Termination
from headway.swarm.trust.play import Answer
from headway.swarm.trust.verifier import Verifier
from headway.swarm.weights.versions import VersionFolders
from headway.swarm.work.fulfil import fulfil
from headway.transport.weights import make_sender

LORA = LoraSettings(rank=4)


@pytest.fixture(scope="module")
def swarm() -> Swarm:
    return make_swarm()


def publish(folder: Path) -> tuple[VersionFolders, dict[int, WeightUpdate]]:
    """Publish two versions of an adapter, as a trainer does."""
    base = resolve_model("tiny")
    versions, updates = VersionFolders(folder / "versions", base, LORA), {}
    sender = make_sender(FilesystemWeights(keep_last=10), RunPaths(folder))
    for version in (1, 2):
        model = load_model(base, dtype=torch.float32)
        apply_lora(model, LORA, seed=version)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("lora_B"):
                    # The second one is a step of 1e-3 further.
                    parameter.normal_(std=0.1, generator=generator).add_(1e-3 * version)
        updates[version] = sender.publish(version, adapter_tensors(model), adapter="policy")
        versions.fetch(updates[version])
    return versions, updates


async def contribute(swarm: Swarm, order: WorkOrder, versions: VersionFolders, served: WeightUpdate) -> Contribution:
    """Fulfil an order with the adapter of `served`, whatever version was ordered."""
    options = ContributeOptions("", Path(), device="cpu", threads=1, dtype="float32")
    engine = LocalEngine(options, SwarmTerms("a-run", "", "", {}, "auto", CONTEXT, ("float32",)))
    await engine.serve(versions.path(served.version), order.version, served.fingerprint, versions.adapter_terms())
    assert engine._service is not None
    prompt: list[int] = []

    def ask(request: EpisodeRequest) -> Answer:
        def answer(asked: Prompt) -> Reply:
            prompt[:] = asked.token_ids
            return Reply([0], [0.0], [(order.version, 1)], "length", 1.0)

        return answer

    await fulfil(order, swarm.player, ask, "float32")
    requests = [order.request(index) for index in range(len(order.seeds))]
    asked = [GenerateRequest(prompt, sampling_params=stopping(each.sampling, swarm.stops)) for each in requests]
    results = await asyncio.gather(*(engine._service.generate(each) for each in asked))
    replies = {
        request.episode_id: Reply(
            choice.token_ids, choice.logprobs, choice.versions, choice.finish_reason, request.sampling.temperature
        )
        for request, choice in zip(requests, (result.choices[0] for result in results), strict=True)
    }

    def answer_for(request: EpisodeRequest) -> Answer:
        return lambda _: replies[request.episode_id]

    made = await fulfil(order, swarm.player, answer_for, "float32")
    made.proofs = await engine.prove(made.episodes)
    await engine.close()
    return made


def test_an_older_adapter_is_refused(swarm: Swarm, tmp_path: Path) -> None:
    versions, updates = publish(tmp_path)
    order = swarm.terms.order(b"w" * 32, 2, updates[2].fingerprint, 0)
    light = (Form(swarm.vocab_size, swarm.width), Termination(swarm.stops))
    verifiers = {
        "all": Verifier(light, swarm.player, versions.model),
        "activations": Verifier(light, swarm.player, versions.model, [Activations()]),
    }
    for served, refused_by in ((2, ["", ""]), (1, ["logprobs", "activations"])):
        sent = asyncio.run(contribute(swarm, order, versions, updates[served]))
        found = [asyncio.run(verifier.verify(order, sent, spot=None))[0] for verifier in verifiers.values()]
        assert [verdict.check for verdict in found] == refused_by, found
        assert [verdict.accepted for verdict in found] == [not check for check in refused_by]
