"""Routed experts on their way from the engine to samples: once per token, packed, in binary."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from engine_common import MOE, make_engine, make_model, prompt, request, run_all
from engine_serving import EmbeddedServer, start_server

from headway.core.episodes import EpisodeRequest, Task
from headway.core.messages import Message
from headway.core.protocol import MSGPACK, GenerateRequest, GenerateResponse, SamplingParams
from headway.envs.engines.engines import Engines
from headway.envs.engines.policy import EnginePolicy
from headway.envs.engines.sampler import EngineSampler
from headway.envs.samples import trace_samples
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.tiny_tokenizer import save_tiny_tokenizer
from headway.rendering.load import load_renderer
from headway.transport import inference
from headway.transport.inference import EngineError, InferenceClient

TURNS = 100


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    folder = tmp_path_factory.mktemp("moe")
    config = replace(MOE, vocab_size=save_tiny_tokenizer(folder), max_len=4096)
    save_checkpoint(build_model(config, seed=1), folder / "model", files_from=folder)
    live = start_server(folder / "model", seq_len=4096)
    yield live
    live.close()


def test_an_engine_returns_the_experts_of_new_tokens_only() -> None:
    engine = make_engine(make_model(MOE))
    whole = run_all(engine, [request(prompt(20), 10, temperature=0.0)])[0].choices[0].experts
    asked = request(prompt(20), 10, temperature=0.0)
    asked.routed_experts_start = 13
    part = run_all(engine, [asked])[0].choices[0].experts
    assert whole is not None and part is not None
    assert np.array_equal(part, whole[13:])


def test_bytes_of_a_reply_follow_its_new_tokens_over_100_turns(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole reply, not only its experts: nothing in it may grow with the conversation."""
    sizes: list[int] = []
    decode = inference._decode

    def counted(url: str, content: bytes, *rest: Any, **more: Any) -> Any:
        if url.endswith("/generate"):
            sizes.append(len(content))
        return decode(url, content, *rest, **more)

    monkeypatch.setattr(inference, "_decode", counted)

    async def converse() -> EnginePolicy:
        engines, renderer = Engines(), load_renderer(server.folder)
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
        asked = EpisodeRequest("e", "g", Task("t"), [server.url], sampling=sampling)
        policy = EnginePolicy(renderer, EngineSampler(asked, engines, ()))
        messages = [Message("user", "go")]
        for _ in range(TURNS):
            messages += [await policy.chat(messages), Message("user", "on")]
        await engines.close()
        return policy

    trace = asyncio.run(converse()).tree.trace
    records = [node.routed_experts for node in trace.nodes if node.routed_experts is not None]
    assert len(sizes) == len(records) == TURNS
    assert [record.start for record in records[1:]] == [record.end for record in records[:-1]]
    assert max(sizes[1:]) < 1.2 * min(sizes[1:])
    (sample,) = trace_samples(trace)
    assert sample.routed_experts is not None
    assert (sample.routed_experts[:-1] >= 0).all() and (sample.routed_experts[-1] == -1).all()


def test_binary_and_json_say_the_same(server: EmbeddedServer) -> None:
    asked = GenerateRequest([5, 6, 7, 8], sampling_params=SamplingParams(max_tokens=6, seed=3), routed_experts_start=2)

    async def ask(accept: str) -> tuple[str, bytes]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{server.url}/inference/v1/generate", data=msgspec.json.encode(asked), headers={"Accept": accept}
            ) as reply,
        ):
            return reply.content_type, await reply.read()

    kind, text = asyncio.run(ask("*/*"))
    binary_kind, binary = asyncio.run(ask(MSGPACK))
    assert (kind, binary_kind) == ("application/json", MSGPACK)
    plain, packed = (
        msgspec.json.decode(text, type=GenerateResponse).choices[0],
        msgspec.msgpack.decode(binary, type=GenerateResponse).choices[0],
    )
    assert plain.token_ids == packed.token_ids and plain.logprobs == packed.logprobs
    assert plain.routed_experts is not None and packed.routed_experts is not None
    assert not plain.routed_experts.packed and packed.routed_experts.packed
    assert (packed.routed_experts.start, packed.routed_experts.end) == (2, 9)
    assert np.array_equal(plain.routed_experts.array(), packed.routed_experts.array())


def test_a_start_outside_the_prompt_is_refused(server: EmbeddedServer) -> None:
    async def ask() -> None:
        async with InferenceClient(server.url) as client:
            await client.generate(GenerateRequest([5, 6], routed_experts_start=3))

    with pytest.raises(EngineError, match="routed_experts_start must be 0 to 2"):
        asyncio.run(ask())


def test_the_folder_is_a_mixture_for_vllm(server: EmbeddedServer, tmp_path: Path) -> None:
    from headway.config.inference import InferenceSettings, ServeSettings
    from headway.inference.vllm.arguments import RECORD_EXPERTS, arguments, read_config

    assert read_config(server.folder).experts == MOE.experts
    assert arguments(ServeSettings(), server.folder, "cuda", 10**9)[RECORD_EXPERTS] is True
    off = ServeSettings(inference=InferenceSettings(vllm={RECORD_EXPERTS: False}))
    assert arguments(off, server.folder, "cuda", 10**9)[RECORD_EXPERTS] is False
