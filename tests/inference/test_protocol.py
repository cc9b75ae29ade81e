"""The inference protocol over real sockets. Whatever engine is behind it, these hold."""

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from engine_common import publish, training_logprobs
from engine_serving import LiveServer
from numpy.typing import NDArray

from headway.core.protocol import EngineState, GenerateChoice, GenerateRequest, SamplingParams, WeightUpdate
from headway.models.checkpoints.folders import load_model, save_checkpoint
from headway.models.decoder import DecoderLM
from headway.rendering.load import load_renderer
from headway.transport.inference import EngineError, InferenceClient


def call(server: LiveServer, method: str, route: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of one request. `body` is sent as JSON unless it is bytes."""

    async def send() -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, server.url + route, data=data, headers=headers) as reply,
        ):
            return reply.status, json.loads(await reply.read())

    return asyncio.run(send())


def generate(server: LiveServer, tokens: list[int], **params: Any) -> Any:
    status, body = call(server, "POST", "/inference/v1/generate", {"token_ids": tokens, "sampling_params": params})
    assert status == 200, body
    return body


def with_client(server: LiveServer, body: Any, token: str | None = None) -> None:
    async def run() -> None:
        async with InferenceClient(server.url, token=token) as client:
            await body(client)

    asyncio.run(asyncio.wait_for(run(), 240))


async def until_state(client: InferenceClient, condition: Callable[[EngineState], bool]) -> None:
    while not condition(await client.state()):  # noqa: ASYNC110 (what is waited for happens in another process)
        await asyncio.sleep(0.01)


def test_generate_has_the_shape_of_the_protocol(server: LiveServer) -> None:
    body = generate(server, [5, 6, 7], max_tokens=4, logprobs=2, seed=1)
    assert body["prompt_token_ids"] == [5, 6, 7]
    choice = body["choices"][0]
    assert len(choice["token_ids"]) == 4 and choice["finish_reason"] in ("length", "stop")
    assert sum(count for _, count in choice["versions"]) == 4
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token"] == f"token_id:{token}" and entry["token_id"] == token
        assert entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 4, 7)


def test_seeds_reproduce_and_zero_temperature_is_greedy(server: LiveServer) -> None:
    draws = [generate(server, [5, 6, 7], max_tokens=12, seed=s)["choices"][0]["token_ids"] for s in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    greedy = generate(server, [5, 6, 7], max_tokens=6, temperature=0, logprobs=1)["choices"][0]
    for entry in greedy["logprobs"]["content"]:
        assert entry["top_logprobs"][0]["token_id"] == entry["token_id"]


def test_n_choices_of_one_seed_differ(server: LiveServer) -> None:
    choices = generate(server, [5, 6, 7], max_tokens=12, seed=1, n=5, temperature=1.5)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 5


def test_prompt_logprobs_start_with_nothing(server: LiveServer) -> None:
    body = generate(server, [5, 6, 7, 8], max_tokens=1, prompt_logprobs=1)
    assert body["prompt_logprobs"][0] is None
    assert [entry["token_id"] for entry in body["prompt_logprobs"][1:]] == [6, 7, 8]


def test_generate_streams_what_it_would_return(server: LiveServer) -> None:
    whole = generate(server, [5, 6, 7], max_tokens=9, seed=4)["choices"][0]

    async def body() -> None:
        request = {"token_ids": [5, 6, 7], "stream": True, "sampling_params": {"max_tokens": 9, "seed": 4}}
        async with (
            aiohttp.ClientSession() as session,
            session.post(server.url + "/inference/v1/generate", json=request) as reply,
        ):
            lines = [line async for line in reply.content if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]\n"
        chunks = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
        assert len(chunks) > 1
        assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
        assert chunks[-1]["finish_reason"] == whole["finish_reason"]
        assert chunks[-1]["versions"] == whole["versions"]

    asyncio.run(body())


def test_models_state_health_and_metrics(server: LiveServer) -> None:
    status, models = call(server, "GET", "/v1/models")
    assert status == 200 and models["data"][0]["id"] == "policy" and models["data"][0]["max_model_len"] == 512
    assert call(server, "GET", "/health") == (200, {"status": "ok"})
    status, state = call(server, "GET", "/state")
    assert status == 200 and state["kv_capacity_tokens"] > 0

    async def text() -> str:
        async with aiohttp.ClientSession() as session, session.get(server.url + "/metrics") as reply:
            return await reply.text()

    assert "headway_generated_tokens_total " in asyncio.run(text())


MALFORMED: list[tuple[Any, str | None]] = [
    (b"", "token_ids"),
    (b"{", None),
    (b"\xff\xfe", None),
    (b"[1, 2]", None),
    ({}, None),
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": "abc"}, "token_ids"),
    ({"token_ids": [1, -1]}, "token_ids"),
    ({"token_ids": [10**9]}, "token_ids"),
    ({"token_ids": [10**30]}, "token_ids"),
    ({"token_ids": [1] * 512}, "token_ids"),
    ({"token_ids": [1], "model": "nobody"}, "model"),
    ({"token_ids": [1], "priority": 2**40}, "priority"),
    ({"token_ids": [1], "sampling_params": {"temperature": -0.1}}, "temperature"),
    ({"token_ids": [1], "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
    ({"token_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
    ({"token_ids": [1], "sampling_params": {"top_p": 1.5}}, "top_p"),
    ({"token_ids": [1], "sampling_params": {"top_k": -2}}, "top_k"),
    ({"token_ids": [1], "sampling_params": {"min_p": 2}}, "min_p"),
    ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
    ({"token_ids": [1], "sampling_params": {"n": 0}}, "n"),
    ({"token_ids": [1], "sampling_params": {"n": 10**6}}, "n"),
    ({"token_ids": [1], "sampling_params": {"logprobs": 10**6}}, "logprobs"),
    ({"token_ids": [1], "sampling_params": {"prompt_logprobs": -1}}, "prompt_logprobs"),
    ({"token_ids": [1], "sampling_params": {"stop_token_ids": [-5]}}, "stop_token_ids"),
]


@pytest.mark.parametrize("case", range(len(MALFORMED)))
def test_malformed_requests_are_refused_with_a_reason(server: LiveServer, case: int) -> None:
    body, param = MALFORMED[case]
    status, reply = call(server, "POST", "/inference/v1/generate", body)
    assert 400 <= status < 500
    assert set(reply["error"]) == {"message", "type", "param", "code"} and reply["error"]["message"]
    if param is not None and body:
        assert reply["error"]["param"] == param


def test_a_thousand_malformed_requests_cost_nothing(server: LiveServer) -> None:
    chance = random.Random(0)

    def broken() -> bytes:
        whole = json.dumps({"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "temperature": -1}})
        kind = chance.randrange(3)
        if kind == 0:
            return whole[: chance.randrange(1, len(whole))].encode()
        if kind == 1:
            return bytes(chance.randrange(256) for _ in range(chance.randrange(1, 200)))
        return whole.encode()

    async def body() -> None:
        routes = ["/inference/v1/generate", "/v1/chat/completions", "/v1/completions"]
        async with aiohttp.ClientSession() as session:
            for start in range(0, 1000, 50):
                statuses = await asyncio.gather(*(post(session, routes[n % 3]) for n in range(start, start + 50)))
                assert all(400 <= status < 500 for status in statuses)

    async def post(session: aiohttp.ClientSession, route: str) -> int:
        async with session.post(server.url + route, data=broken()) as reply:
            await reply.read()
            return reply.status

    before = call(server, "GET", "/state")[1]
    asyncio.run(body())
    after = call(server, "GET", "/state")[1]
    assert (after["running"], after["waiting"], after["kv_usage"]) == (0, 0, 0)
    assert after["generated_tokens"] == before["generated_tokens"]
    assert generate(server, [1, 2], max_tokens=2)["choices"]


def test_unknown_routes_and_methods_answer_in_json(server: LiveServer) -> None:
    assert call(server, "GET", "/nothing")[1]["error"]["type"] == "not_found_error"
    assert call(server, "GET", "/inference/v1/generate")[0] == 405


@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("GET", "/weights"),
        ("POST", "/weights"),
        ("POST", "/adapters"),
        ("DELETE", "/adapters/x"),
        ("POST", "/pause"),
        ("POST", "/resume"),
    ],
)
def test_admin_routes_demand_the_token(server: LiveServer, method: str, route: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret2"}):
        status, body = call(server, method, route, {} if method == "POST" else None, **headers)
        assert status == 401 and body["error"]["type"] == "authentication_error"


def test_weights_go_in_and_show(server: LiveServer, tmp_path: Path) -> None:
    update = publish(tmp_path, 3, load_model(server.folder))

    async def body(client: InferenceClient) -> None:
        reply = await client.update_weights(update)
        assert (reply.version, reply.fingerprint) == (3, update.fingerprint) and reply.bytes > 0
        state = await client.weights()
        assert (state.version, state.fingerprint) == (3, update.fingerprint)
        assert (await client.state()).version == 3
        again = await client.update_weights(update)
        assert again.bytes == 0
        response = await client.generate(
            GenerateRequest([1, 2, 3], sampling_params=SamplingParams(max_tokens=3, ignore_eos=True))
        )
        assert [tuple(run) for run in response.choices[0].versions] == [(3, 3)]

    with_client(server, body, server.token)


def test_a_wrong_update_is_refused_and_nothing_changes(server: LiveServer, tmp_path: Path) -> None:
    update = publish(tmp_path, 9, load_model(server.folder))

    async def body(client: InferenceClient) -> None:
        before = await client.weights()
        wrong: list[WeightUpdate] = [
            msgspec.structs.replace(update, fingerprint="f" * 32),
            msgspec.structs.replace(update, transport={"type": "filesystem", "path": str(tmp_path / "none")}),
            msgspec.structs.replace(update, transport={"type": "pigeon"}),
            msgspec.structs.replace(update, transport={"type": "filesystem"}),
            msgspec.structs.replace(update, transport={}),
        ]
        for bad in wrong:
            with pytest.raises(EngineError) as caught:
                await client.update_weights(bad)
            assert 400 <= caught.value.status < 500 and not caught.value.retryable
        assert await client.weights() == before and await client.health()

    with_client(server, body, server.token)


def test_32_requests_in_flight_over_updates_carry_the_right_version_of_every_token(
    server: LiveServer, tmp_path: Path
) -> None:
    """Only the last norm differs between versions, so that what is cached is every version's, and each token's logprob
    tells which version has sampled it."""
    models = {100 + n: scaled(load_model(server.folder), scale) for n, scale in enumerate((1.0, 0.6, 0.0, 0.3, 1.0))}
    updates = [publish(tmp_path, version, model) for version, model in models.items()]
    prompts = [[1 + n, 2, 3] for n in range(32)]

    async def body(client: InferenceClient) -> None:
        await client.update_weights(updates[0])
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        flights = [asyncio.create_task(client.generate(GenerateRequest(p, sampling_params=params))) for p in prompts]
        for update in updates[1:]:
            before = (await client.state()).generated_tokens
            await until_state(client, lambda state, before=before: state.generated_tokens >= before + 32 * 4)
            await client.update_weights(update)
        choices = [(await flight).choices[0] for flight in flights]
        for tokens, choice in zip(prompts, choices, strict=True):
            check(tokens, choice)
        assert max(len(choice.versions) for choice in choices) >= 3

    def check(tokens: list[int], choice: GenerateChoice) -> None:
        assert choice.logprobs is not None and [v for v, _ in choice.versions] == list(models)[: len(choice.versions)]
        got = [entry.logprob for entry in choice.logprobs.content]
        of_version = [version for version, count in choice.versions for _ in range(count)]
        every = {v: training_logprobs(m, tokens + choice.token_ids)[len(tokens) - 1 :] for v, m in models.items()}
        expected = [float(every[version][place]) for place, version in enumerate(of_version)]
        assert np.abs(np.array(got) - np.array(expected)).max() < 1e-4

    with_client(server, body, server.token)


def scaled(model: DecoderLM, scale: float) -> DecoderLM:
    with torch.no_grad():
        model.model.norm.weight.mul_(scale)
    return model


def test_what_is_served_after_an_update_is_hugging_faces(server: LiveServer, tmp_path: Path) -> None:
    """The model's head is tied to its embedding, of which an engine may hold two copies."""
    old, new = load_model(server.folder), shaken(load_model(server.folder))
    updates = [publish(tmp_path, 200, new), publish(tmp_path, 201, old)]
    tokens = [n % 90 for n in range(7, 300, 5)]

    async def body(client: InferenceClient) -> None:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        for update, model in zip(updates, (new, old), strict=True):
            await client.update_weights(update)
            scores = (await client.generate(GenerateRequest(tokens, sampling_params=params))).prompt_logprobs
            assert scores is not None
            served = np.array([score.logprob for score in scores if score is not None])
            assert np.abs(served - hugging_face(model, tmp_path / str(update.version), tokens)).max() < 1e-4

    with_client(server, body, server.token)


def shaken(model: DecoderLM) -> DecoderLM:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)), alpha=0.02)
    return model


def hugging_face(model: DecoderLM, folder: Path, tokens: list[int]) -> NDArray[np.float32]:
    """The logprobs that transformers gives to all tokens but the first."""
    from transformers import AutoModelForCausalLM

    save_checkpoint(model, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(theirs(torch.tensor([tokens])).logits[0], dim=-1)
    return logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def test_pause_holds_requests_until_resume(server: LiveServer) -> None:
    async def body(client: InferenceClient) -> None:
        await client.pause()
        assert (await client.state()).paused
        flight = asyncio.create_task(client.generate(GenerateRequest([1, 2])))
        await asyncio.sleep(0.1)
        assert not flight.done()
        await client.resume()
        assert (await flight).choices[0].token_ids

    with_client(server, body, server.token)


def test_abort_by_id_returns_what_there_was(server: LiveServer) -> None:
    async def body(client: InferenceClient) -> None:
        params = SamplingParams(max_tokens=250, ignore_eos=True)
        request = GenerateRequest([1, 2], sampling_params=params, request_id="mine")
        await client.pause()
        flight = asyncio.create_task(client.generate(request))
        await until_state(client, lambda state: state.running + state.waiting == 1)
        with pytest.raises(EngineError, match="in flight"):
            await client.generate(request)
        await client.abort("mine")
        assert (await flight).choices[0].finish_reason == "abort"
        await client.resume()
        with pytest.raises(EngineError) as caught:
            await client.abort("mine")
        assert caught.value.status == 404

    with_client(server, body, server.token)


def test_a_dropped_connection_cancels(server: LiveServer) -> None:
    async def body(client: InferenceClient) -> None:
        await client.pause()
        params = SamplingParams(max_tokens=250, ignore_eos=True)
        flights = [
            asyncio.create_task(client.generate(GenerateRequest([1, n], sampling_params=params))) for n in range(20)
        ]
        await until_state(client, lambda state: state.running + state.waiting == 20)
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        await until_state(client, lambda state: state.running + state.waiting == 0)
        await client.resume()
        await until_state(client, lambda state: state.kv_usage == 0)

    with_client(server, body, server.token)


def test_a_client_says_what_it_could_not_reach() -> None:
    async def body() -> None:
        async with InferenceClient("http://127.0.0.1:9") as client:
            assert not await client.health()
            with pytest.raises(EngineError, match=r"127\.0\.0\.1:9") as caught:
                await client.state()
            assert caught.value.status == 0 and caught.value.retryable

    asyncio.run(body())


def test_logprobs_of_the_reply_match_the_model(server: LiveServer) -> None:
    body = generate(server, [9, 8, 7, 6], max_tokens=8, seed=2, temperature=0.7)["choices"][0]
    expected = training_logprobs(load_model(server.folder), [9, 8, 7, 6, *body["token_ids"]], 0.7)[3:]
    got = np.array([entry["logprob"] for entry in body["logprobs"]["content"]])
    assert abs(expected.numpy() - got).max() < 1e-4


def test_completions_take_text_or_tokens(server: LiveServer) -> None:
    renderer = load_renderer(server.folder)
    fields = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    status, text = call(server, "POST", "/v1/completions", {"prompt": "Greet", **fields})
    assert status == 200
    tokens = call(server, "POST", "/v1/completions", {"prompt": renderer.encode("Greet"), **fields})[1]
    assert text["choices"][0]["text"] == tokens["choices"][0]["text"]
    assert text["prompt_token_ids"] == renderer.encode("Greet")


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [3]},
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
        },
        {"messages": [{"role": "user", "content": "x"}], "stop": [""]},
        {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"5": 101}},
        {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1000000": 1}},
        {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"yes": 1}},
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}},
        {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}},
        {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 500, "logprobs": True},
        {"messages": [{"role": "user", "content": "x"}], "presence_penalty": 2.5},
        {"messages": [{"role": "user", "content": "x" * 2000}]},
        {"messages": [{"role": "user", "content": "x"}], "model": "gpt-unknown"},
    ],
)
def test_chat_refuses_what_it_cannot_do(server: LiveServer, body: dict[str, Any]) -> None:
    status, reply = call(server, "POST", "/v1/chat/completions", body)
    assert 400 <= status < 500 and reply["error"]["message"]
