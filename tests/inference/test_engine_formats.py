"""OpenAI's own client asks for JSON: schemas, streams, several choices, refusals, and an agent's replies."""

import asyncio
import json
from typing import Any, Literal, cast

import openai
import pytest
from engine_serving import WEATHER, EmbeddedServer, LiveServer
from pydantic import BaseModel, Field

from headway.core.episodes import EpisodeRequest, Task
from headway.core.messages import Message
from headway.core.protocol import SamplingParams
from headway.core.shapes import ReplyShape
from headway.envs.engines.engines import Engines
from headway.envs.engines.policy import EnginePolicy
from headway.envs.engines.sampler import EngineSampler
from headway.envs.policy import ShapeRefused
from headway.models.tiny_tokenizer import tiny_tokenizer
from headway.rendering.load import load_renderer

ASK: Any = [{"role": "user", "content": "Greet me"}]
FIELDS: dict[str, Any] = {"model": "policy", "messages": ASK, "max_tokens": 200}


class Greeting(BaseModel, extra="forbid"):
    text: str = Field(max_length=8)
    tone: Literal["kind", "curt"]
    times: int = Field(ge=1, le=3)


FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "greeting", "schema": Greeting.model_json_schema(), "strict": True},
}


VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(900)])


@pytest.fixture(params=["embedded", VLLM])
def client(request: pytest.FixtureRequest) -> openai.OpenAI:
    server: LiveServer = request.getfixturevalue(request.param)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_model_class_is_filled_in(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(**FIELDS, response_format=Greeting)
    assert reply.choices[0].finish_reason == "stop" and isinstance(reply.choices[0].message.parsed, Greeting)


def test_every_choice_is_valid_and_a_stream_adds_up_to_the_same(client: openai.OpenAI) -> None:
    asked = {**FIELDS, "response_format": FORMAT, "n": 2, "seed": 5, "temperature": 1.5}
    whole = client.chat.completions.create(**asked)
    texts = [choice.message.content or "" for choice in whole.choices]
    for text in texts:
        Greeting.model_validate_json(text)
    assert len(set(texts)) > 1
    streamed = dict.fromkeys(range(2), "")
    for chunk in client.chat.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == texts


def test_any_object_is_json_or_cut_short(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**FIELDS, response_format={"type": "json_object"}, temperature=0)
    text = reply.choices[0].message.content or ""
    assert text.startswith("{")
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("response_format", {"response_format": {"type": "grammar"}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}),
        (
            "response_format",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}},
        ),
        ("ignore_eos", {"response_format": FORMAT, "extra_body": {"ignore_eos": True}}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_formats_that_cannot_be_had_are_refused(
    client: openai.OpenAI, param: str, more: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**FIELDS, **more, stream=stream)
    assert refused.value.param == param


CALL_TOKEN = tiny_tokenizer().token_to_id("<tool_call>")


@pytest.mark.parametrize("bias", [-100, 100])
def test_a_reply_in_a_format_may_call_a_tool_instead(
    client: openai.OpenAI, bias: int, request: pytest.FixtureRequest
) -> None:
    asked = {**FIELDS, "max_tokens": 60, "tools": [WEATHER.to_openai()], "logit_bias": {str(CALL_TOKEN): bias}}
    if request.node.callspec.params["client"] == "vllm":
        with pytest.raises(openai.BadRequestError, match="together with tools needs --engine embedded"):
            client.chat.completions.create(**asked, response_format=FORMAT)
        return
    text = client.chat.completions.create(**asked, response_format=FORMAT).choices[0].message.content or ""
    if bias > 0:  # the format holds no longer, and the bias alone says what comes
        assert text == "<tool_call>" * 60
    else:
        Greeting.model_validate_json(text)


async def check_tools(policy: EnginePolicy) -> None:
    """With tools, a reply is a call or has the format; a model whose calls no single token opens is told so."""
    asked = [Message("user", "Greet me")]
    either = ReplyShape(response_format=FORMAT, logit_bias={CALL_TOKEN: 100})
    await policy.chat(asked, [WEATHER], max_tokens=5, shape=either)
    assert policy.trace.nodes[-1].token_ids == [CALL_TOKEN] * 5
    await policy.chat(asked, max_tokens=5, shape=either)
    assert CALL_TOKEN not in policy.trace.nodes[-1].token_ids[:1]
    cast(Any, policy._renderer).call_mark = None
    with pytest.raises(ShapeRefused, match="no single token opens a call"):
        await policy.chat(asked, [WEATHER], shape=ReplyShape(response_format=FORMAT))


def test_an_episode_keeps_the_tokens_of_a_shaped_reply(embedded: EmbeddedServer) -> None:
    """What agents get through the proxy: a policy's reply, with logprobs of the distribution that was drawn from."""

    async def main() -> None:
        engines = Engines()
        renderer = load_renderer(embedded.folder)
        request = EpisodeRequest("e", "g", Task("0", {}), [embedded.url], sampling=SamplingParams(max_tokens=200))
        policy = EnginePolicy(renderer, EngineSampler(request, engines, renderer.stop_token_ids))
        try:
            reply = await policy.chat([Message("user", "Greet me")], shape=ReplyShape(response_format=FORMAT))
            Greeting.model_validate_json(reply.content)
            node = policy.trace.nodes[-1]
            # Nothing but the quote can follow the brace: a certain token, whatever the model itself thinks of it.
            assert node.logprobs is not None and node.logprobs[1] == pytest.approx(0)
            with pytest.raises(ShapeRefused) as refused:
                await policy.chat([Message("user", "x")], shape=ReplyShape(logit_bias={10**6: 1.0}))
            assert refused.value.param == "logit_bias"
            await check_tools(policy)
        finally:
            await engines.close()

    asyncio.run(main())
