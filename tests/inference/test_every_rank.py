"""Every rank and every copy of vLLM proves what it has loaded: one wrong number in one of them refuses a version."""

import asyncio
from pathlib import Path

import pytest
import torch
from engine_common import publish
from engine_serving import VllmServer
from torch import nn

from headway.base.errors import HeadwayError
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.vllm.updates.loaded import LoadedProof
from headway.models.checkpoints.folders import load_model
from headway.transport.inference import EngineError, InferenceClient


class Rank(nn.Module):
    """The second of two ranks: half of the rows of the embedding, and of its padding; a norm."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(rows, 2)
        self.norm = nn.LayerNorm(3, bias=False)


@pytest.mark.parametrize("whole", [7, 8])
def test_a_rank_holds_its_rows_and_all_of_a_norm(whole: int) -> None:
    came = {"embed_tokens.weight": torch.randn(whole, 2), "norm.weight": torch.randn(3), "layer.weight": torch.ones(2)}
    model = Rank(4)
    proof = LoadedProof(model, 1)
    assert list(proof.watch(came.items())) == list(came.items())
    with torch.no_grad():
        model.embed_tokens.weight[: whole - 4] = came["embed_tokens.weight"][4:]
        model.norm.weight.copy_(came["norm.weight"])
    proof.check()
    with torch.no_grad():
        model.embed_tokens.weight[2, 1] += 1e-6
    with pytest.raises(HeadwayError, match=r"rank 1 holds other weights than came: embed_tokens\.weight"):
        proof.check()


class Mapper:
    def _map_name(self, name: str) -> str | None:
        return name.replace("model.visual.", "visual.").replace("model.language_model.", "language_model.model.")


class Sees(nn.Module):
    """A model whose parameters have other names than the tensors of its checkpoint."""

    supports_multimodal = True
    hf_to_vllm_mapper = Mapper()

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.ModuleDict({"norm": nn.LayerNorm(3), "fused": nn.LayerNorm(6)})
        self.language_model = nn.ModuleDict({"model": nn.ModuleDict({"norm": nn.LayerNorm(3, bias=False)})})


@pytest.mark.parametrize("wrong", ["visual.norm.bias", "language_model.model.norm.weight", None])
def test_norms_and_biases_of_a_vision_tower_are_proven(wrong: str | None) -> None:
    came = {
        "model.visual.norm.weight": torch.randn(3),
        "model.visual.norm.bias": torch.randn(3),
        "model.visual.fused.weight": torch.randn(3),
        "model.language_model.norm.weight": torch.randn(3),
    }
    model = Sees()
    proof = LoadedProof(model, 0)
    assert list(proof.watch(came.items())) == list(came.items())
    with torch.no_grad():
        model.visual["norm"].weight.copy_(came["model.visual.norm.weight"])
        model.visual["norm"].bias.copy_(came["model.visual.norm.bias"])
        model.get_parameter("language_model.model.norm.weight").copy_(came["model.language_model.norm.weight"])
        if wrong is not None:
            model.get_parameter(wrong)[1] += 1e-6
    if wrong is None:
        proof.check()
        return
    with pytest.raises(HeadwayError, match=f"rank 0 holds other weights than came: {wrong}"):
        proof.check()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["tensor", "data"])
def test_damage_in_one_rank_refuses_the_version(vllm_ranks: dict[str, VllmServer], kind: str, tmp_path: Path) -> None:
    """Requests go on with the version before, which every rank has loaded again."""
    server = vllm_ranks[kind]
    damage = server.log.with_name("damage")
    model = load_model(server.folder)

    async def play() -> None:
        async with InferenceClient(server.url, token=server.token) as client:
            asked = GenerateRequest([5, 6, 7], sampling_params=SamplingParams(max_tokens=8, temperature=0.0))
            before, reply = await client.weights(), await client.generate(asked)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            update = publish(tmp_path, before.version + 1, model)
            damage.write_text(kind)
            with pytest.raises(EngineError, match=r"holds other weights than came: model\.embed_tokens\.weight"):
                await client.update_weights(update)
            assert not damage.exists() and (await client.weights()).version == before.version
            for _ in range(4):
                again = await client.generate(asked)
                assert again.choices[0].token_ids == reply.choices[0].token_ids
            await client.update_weights(update)
            assert (await client.weights()).version == update.version

    asyncio.run(play())
