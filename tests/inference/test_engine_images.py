"""The embedded engine with images: logprobs are those of the training pass, however prompts are cut, cached or begun
again."""

import asyncio
import base64
import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from engine_common import make_engine, run_all
from engine_serving import EmbeddedServer, start_server
from image_common import drawn, expected
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tenants_common import client, grant

from headway.core.episodes import Episode, EpisodeRequest, Task
from headway.core.image_files import ImageFiles
from headway.core.images import Grid, ImageUse, RequestImage, data_url, image_digest
from headway.core.messages import Message, as_messages, image_part
from headway.core.protocol import Continued, GenerateRequest, SamplingParams
from headway.core.records import RolloutRecord, without_experts, write_rollouts
from headway.core.runs import RunPaths
from headway.envs.engines.engines import Engines
from headway.envs.engines.policy import EnginePolicy
from headway.envs.engines.sampler import EngineSampler
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.images import ServedImage
from headway.inference.outputs import Choice
from headway.models.build import build_model
from headway.models.registry import config_from_hf
from headway.models.tiny import save_built_in
from headway.models.vision.config import VisionConfig
from headway.models.vision.decoder import VisionLM
from headway.rendering.load import load_renderer
from headway.transport.inference import EngineError, InferenceClient

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from hostile_parts.images import malformed_image

CASES = Path(__file__).parents[1] / "models" / "families"
GRIDS = [Grid(1, 4, 4), Grid(1, 2, 6), Grid(1, 6, 4)]
"""Sizes of images, for models that take several."""
MODELS = sorted(path.parent.name for path in CASES.glob("*/images.json"))


def make_model(name: str, seed: int = 1) -> VisionLM:
    """Random weights, large enough that replies depend visibly on what images show."""
    hf = json.loads((CASES / name / "images.json").read_text())
    del hf["images"]
    model = build_model(config_from_hf(hf), seed=seed)
    assert isinstance(model, VisionLM)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return model


def make_prompt(model: VisionLM, grids: list[Grid], seed: int) -> tuple[list[int], tuple[ServedImage, ...]]:
    config = model.config
    assert isinstance(config, VisionConfig)
    draw = np.random.default_rng(seed)
    tokens, images = draw.integers(0, 50, 3).tolist(), []
    for number, wanted in enumerate(grids):
        grid = config.tower.only_grid or wanted
        count = grid.patches // config.tower.merge**2
        pixels = np.random.default_rng((seed, number)).standard_normal(
            (grid.patches, config.tower.patch_numbers), dtype=np.float32
        )
        images.append(ServedImage(ImageUse(len(tokens), count, image_digest(pixels.tobytes())), grid, pixels))
        tokens += [config.image_token] * count + draw.integers(0, 50, 5).tolist()
    return tokens, tuple(images)


def ask(engine: EmbeddedEngine, number: int, tokens: list[int], images: tuple[ServedImage, ...]) -> None:
    params = SamplingParams(max_tokens=10, seed=number, ignore_eos=True)
    engine.add(GenerateRequest(list(tokens), sampling_params=params), f"r{number}", None, images)


def finish(engine: EmbeddedEngine) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for _ in range(2000):
        if engine.idle:
            return results
        results |= {request.request_id: item for request, item in engine.step()}
    raise AssertionError("the engine does not end")


def check(model: VisionLM, tokens: list[int], images: tuple[ServedImage, ...], choice: Choice) -> None:
    logprobs = expected(model, tokens + choice.token_ids, images)[len(tokens) - 1 :]
    torch.testing.assert_close(torch.tensor(choice.logprobs), logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_training(name: str) -> None:
    """Chunks end inside of images, prompts share prefixes, blocks run out, and texts run beside."""
    model = make_model(name)
    engine = make_engine(model, max_batched_tokens=7, num_blocks=18, max_running=4, max_model_len=64)
    shared, seen = make_prompt(model, GRIDS[:2], 0)
    prompts = [(shared, seen), ([*shared, 1, 2], seen), make_prompt(model, [], 1), make_prompt(model, GRIDS, 2)]
    for number, (tokens, images) in enumerate(prompts):
        ask(engine, number, tokens, images)
    results = finish(engine)
    assert engine.scheduler.preemptions
    for number, (tokens, images) in enumerate(prompts):
        check(model, tokens, images, results[f"r{number}"].choices[0])
    ask(engine, 9, *prompts[0])
    again = finish(engine)["r9"]
    assert again.cached_tokens >= len(shared) // 4 * 4 - 4
    check(model, *prompts[0], again.choices[0])


@pytest.mark.parametrize("name", MODELS)
def test_prefixes_are_shared_only_where_images_are_the_same(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model)
    tokens, images = make_prompt(model, GRIDS[:1], 0)
    _, others = make_prompt(model, GRIDS[:1], 5)
    ask(engine, 0, tokens, images)
    first = finish(engine)["r0"]
    assert engine.runner.images is not None and engine.runner.images.passes == 1
    ask(engine, 1, tokens, others)
    other = finish(engine)["r1"]
    # The first image begins at token 3: no whole block comes before it.
    assert other.cached_tokens == 0 and engine.runner.images.passes == 2
    check(model, tokens, others, other.choices[0])
    ask(engine, 2, tokens, images)
    same = finish(engine)["r2"]
    assert same.cached_tokens > 0 and engine.runner.images.passes == 2
    assert first.cached_tokens == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", [3, 64])
def test_images_are_cut_only_where_their_tokens_do_not_see_each_other(name: str, budget: int) -> None:
    """A step may be smaller than an image, and prompts may differ right behind one, in a block that it shares."""
    model = make_model(name)
    engine = make_engine(model, max_batched_tokens=budget)
    tokens, images = make_prompt(model, GRIDS[:2], 0)
    first = images[0].use
    other = list(tokens)
    other[first.at + first.tokens] += 1
    for number, prompt in enumerate((tokens, other)):
        ask(engine, number, prompt, images)
        result = finish(engine)[f"r{number}"]
        check(model, prompt, images, result.choices[0])
    whole = isinstance(model.config, VisionConfig) and model.config.bidirectional_images
    assert result.cached_tokens == (0 if whole else (first.at + first.tokens) // 4 * 4)


@pytest.mark.parametrize("name", MODELS)
def test_new_weights_make_new_features(name: str) -> None:
    """The tower's too: an image that was seen under old weights is computed again."""
    model, newer = make_model(name), make_model(name, seed=2)
    engine = make_engine(model)
    tokens, images = make_prompt(model, GRIDS[:2], 0)
    ask(engine, 0, tokens, images)
    finish(engine)
    model.load_state_dict(newer.state_dict())
    engine.weights_changed(1)
    ask(engine, 1, tokens, images)
    check(newer, tokens, images, finish(engine)["r1"].choices[0])


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_a_model_without_images(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model)
    tokens, _ = make_prompt(model, [], 3)
    request = GenerateRequest(list(tokens), sampling_params=SamplingParams(max_tokens=6, seed=1, ignore_eos=True))
    (result,) = run_all(engine, [request])
    check(model, tokens, (), result.choices[0])
    assert engine.runner.images is not None and engine.runner.images.passes == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    folder = tmp_path_factory.mktemp("sees") / "tiny-vl"
    save_built_in("tiny-vl", folder)
    live = start_server(folder, seq_len=1024)
    yield live
    live.close()


def chat_body(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "How many?"}, *parts]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    return body | {"logprobs": True} | fields


async def post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as reply:
        return reply.status, await reply.json()


def test_chat_with_images(server: EmbeddedServer) -> None:
    """What an image shows decides the logprobs, and these are the trainer's."""

    async def replies() -> list[dict[str, Any]]:
        found = []
        for color in ("red", "blue", "red"):
            status, reply = await post(server.url, chat_body(image_part(drawn(color)), return_token_ids=True))
            assert status == 200, reply
            found.append(reply)
        return found

    red, blue, again = asyncio.run(replies())
    values = [[entry["logprob"] for entry in r["choices"][0]["logprobs"]["content"]] for r in (red, blue, again)]
    assert values[0] != values[1] and np.allclose(values[0], values[2], atol=1e-5)
    model = server.service._engine.model
    assert isinstance(model, VisionLM)
    renderer = load_renderer(server.folder)
    messages = as_messages(chat_body(image_part(drawn("red")))["messages"])
    rendered = renderer.render(messages, generation_prompt=True)
    assert red["usage"]["prompt_tokens"] == len(rendered.token_ids)
    (use,) = rendered.images
    grid, patches = renderer.reader.read(use.digest, drawn("red"))  # type: ignore[attr-defined]
    tokens = [entry["token_id"] for entry in red["choices"][0]["logprobs"]["content"]]
    logprobs = expected(model, rendered.token_ids + tokens, (ServedImage(use, grid, patches),))
    np.testing.assert_allclose(values[0], logprobs[len(rendered.token_ids) - 1 :], atol=1e-5)


def bomb() -> bytes:
    """A few kilobytes that would be 400 million pixels."""
    small = drawn("red", (1, 1))
    return small[:16] + (20_000).to_bytes(4, "big") * 2 + small[24:]


BAD = {
    "broken": image_part(drawn("red")[:50]),
    "huge": image_part(drawn("red", (30_000, 1))),
    "bomb": image_part(bomb()),
    "animated": image_part(drawn("red", kind="GIF", save_all=True, append_images=[Image.new("RGB", (32, 24), "blue")])),
    "narrow": image_part(drawn("red", (1000, 1))),
    "no image": {"type": "image_url", "image_url": {"url": data_url(b"hello")}},
    "wrong type": {"type": "image_url", "image_url": {"url": "data:application/pdf;base64,AAAA"}},
    "svg": {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,AAAA"}},
    "address": {"type": "image_url", "image_url": {"url": "http://localhost/cat.png"}},
    "not base64": {"type": "image_url", "image_url": {"url": "data:image/png;base64,!!!!"}},
    "not text": {"type": "image_url", "image_url": {"url": 7}},
    "nothing": {"type": "image_url"},
    "literal": {"type": "text", "text": "<|image_pad|>"},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_refused_with_the_reason(name: str, server: EmbeddedServer) -> None:
    parts = [BAD[name]] + ([image_part(drawn("red"))] if name == "literal" else [])
    status, reply = asyncio.run(post(server.url, chat_body(*parts)))
    assert status == 400 and reply["error"]["param"] == "messages", reply
    assert len(reply["error"]["message"]) < 400


def test_too_many_images_are_refused(server: EmbeddedServer) -> None:
    status, reply = asyncio.run(post(server.url, chat_body(*[image_part(drawn("red"))] * 65)))
    assert status == 400 and "65 images" in reply["error"]["message"]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_malformed_images_are_refused_and_leave_nothing_behind(server: EmbeddedServer) -> None:
    """A small part of what `benchmarks/hostile.py --images 2000` sends."""
    images, rng = server.service._images, random.Random(5)
    assert images is not None
    known = set(images._kept)
    kinds = set()

    async def send() -> None:
        async with aiohttp.ClientSession() as session:
            for _ in range(80):
                kind, (route, body) = malformed_image(rng)
                async with session.post(server.url + route, data=body) as reply:
                    assert 400 <= reply.status < 500, (kind, await reply.text())
                kinds.add(kind)

    asyncio.run(send())
    assert len(kinds) == 13 and set(images._kept) == known
    assert asyncio.run(post(server.url, chat_body(image_part(drawn("red")))))[0] == 200


TURNS = 30


def padded(number: int) -> bytes:
    """Four tokens, and bytes that nothing else has."""
    notes = PngInfo()
    notes.add_text("note", random.Random(number).randbytes(1500).hex())
    return drawn("red", (16, 16), pnginfo=notes)


def test_each_image_travels_and_is_stored_once_in_thirty_turns(server: EmbeddedServer, tmp_path: Path) -> None:
    """To the engine, also when that has forgotten the conversation's tokens; to the orchestrator; and in the run."""
    sent = bytearray()

    async def count(session: Any, context: Any, params: aiohttp.TraceRequestChunkSentParams) -> None:
        sent.extend(params.chunk)

    async def talk() -> Episode:
        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(count)
        engines = Engines()
        engines._session = aiohttp.ClientSession(trace_configs=[trace])
        request = EpisodeRequest("e", "g", Task("t"), [server.url], sampling=SamplingParams(max_tokens=2, seed=1))
        policy = EnginePolicy(load_renderer(server.folder), EngineSampler(request, engines, []))
        messages: list[Message] = []
        for number in range(TURNS):
            said = [image_part(padded(n)) for n in (number, number // 2)]
            if number == TURNS // 2:  # a refused request carries no image, or that would travel twice
                server.context.conversations._kept.clear()
                said = [{"type": "text", "text": "and?"}]
            messages += as_messages({"role": "user", "content": said})
            messages.append(await policy.chat(messages))
        await engines.close()
        return Episode("e", "g", "env", Task("t"), traces=[policy.trace], images=policy.images)

    episode = asyncio.run(talk())
    images = [padded(number) for number in range(TURNS) if number != TURNS // 2]
    frames = msgspec.msgpack.encode(episode)
    for data in images:
        copies = [sent.count(data) + sent.count(base64.b64encode(data)), frames.count(data)]
        assert copies == [1, 1], image_digest(data)
    total = sum(map(len, images))
    assert len(sent) < 1.5 * total and len(frames) < 1.5 * total
    paths = RunPaths(tmp_path)
    record = RolloutRecord(1, "env", "g", 0.0, without_experts(episode))
    write_rollouts(paths, 1, [record])
    for _ in range(2):
        ImageFiles(paths.images).keep(episode.images)
    assert sorted(file.read_bytes() for file in paths.images.iterdir()) == sorted(images)
    stored = gzip.decompress(paths.rollout_records(1).read_bytes())
    assert len(stored) < total and not any(data in stored or base64.b64encode(data) in stored for data in images)


def test_images_of_a_conversation_are_sent_once(server: EmbeddedServer) -> None:
    """Requests name images by digest; bytes that are not there are asked for."""
    renderer = load_renderer(server.folder)
    data = drawn("green", (40, 40))
    messages = as_messages([{"role": "user", "content": [image_part(data)]}])
    rendered = renderer.render(messages, generation_prompt=True)
    (use,) = rendered.images
    bare = RequestImage(use.at, use.tokens, use.digest)
    whole = RequestImage(use.at, use.tokens, use.digest, data)
    params = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)

    def request(*images: RequestImage, **fields: Any) -> GenerateRequest:
        return GenerateRequest(list(rendered.token_ids), sampling_params=params, images=list(images), **fields)

    async def talk() -> None:
        async with InferenceClient(server.url, token=server.token) as client:
            with pytest.raises(EngineError) as missing:
                await client.generate(request(bare))
            assert (missing.value.status, missing.value.param) == (409, "images")
            first = await client.generate(request(whole))
            second = await client.generate(request(bare))
            assert first.choices[0].token_ids == second.choices[0].token_ids and second.usage.cached_tokens
            chunks = [chunk async for chunk in client.generate_stream(request(bare, stream=True))]
            kept = chunks[-1].kept
            assert kept is not None
            reply = [token for chunk in chunks for choice in chunk.choices for token in choice.token_ids]
            later = GenerateRequest([5, 6], sampling_params=params)
            later.continues = Continued(kept, len(rendered.token_ids) + len(reply))
            told = [chunk async for chunk in client.generate_stream(later)]
            whole_again = request(bare)
            whole_again.token_ids += [*reply, 5, 6]
            again = await client.generate(whole_again)
            assert [t for chunk in told for c in chunk.choices for t in c.token_ids] == again.choices[0].token_ids
            wrong = RequestImage(use.at, use.tokens, "0" * 32, data)
            for image in (wrong, RequestImage(0, use.tokens, use.digest, data), RequestImage(use.at, 3, use.digest)):
                with pytest.raises(EngineError) as refused:
                    await client.generate(request(image))
                assert (refused.value.status, refused.value.param) == (400, "images")

    asyncio.run(talk())


def test_tenants_are_told_that_they_cannot_use_images(server: EmbeddedServer) -> None:
    data = drawn("red")
    image = RequestImage(1, 12, image_digest(data), data)

    async def ask_as_tenant() -> None:
        async with client(server) as host:
            await host.put_tenants([grant("anna")])
        async with client(server, "anna") as anna:
            with pytest.raises(EngineError, match="tenants of a host can't use images yet") as refused:
                await anna.generate(GenerateRequest([5, *[271] * 12, 6], images=[image]))
        assert (refused.value.status, refused.value.param) == (400, "images")
        headers = {"Authorization": "Bearer token of anna"}
        asked = {"json": chat_body(image_part(data)), "headers": headers}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.url}/v1/chat/completions", **asked) as reply,
        ):
            assert reply.status == 400 and "tenants of a host" in await reply.text()
        async with client(server) as host:
            await host.put_tenants([])

    asyncio.run(ask_as_tenant())


def test_a_text_model_refuses_images(tmp_path: Path) -> None:
    save_built_in("tiny", tmp_path / "tiny")
    live = start_server(tmp_path / "tiny")
    try:
        status, reply = asyncio.run(post(live.url, chat_body(image_part(drawn("red")))))
        assert status == 400 and "does not see" in reply["error"]["message"]
    finally:
        live.close()
