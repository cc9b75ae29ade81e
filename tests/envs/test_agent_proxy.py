"""The chat API that unmodified agents are pointed at, called with OpenAI's own client."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError

from headway.core.messages import Message, Tool, ToolCall
from headway.core.shapes import ReplyShape
from headway.envs.agents.proxy import Endpoint, Proxy
from headway.envs.policy import ContextLimit, EpisodeFailure, Policy, ScriptedPolicy, ShapeRefused

WEATHER = Tool("weather", "Tell the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})


def with_endpoint(policy: Policy, use: Callable[[AsyncOpenAI, Endpoint], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        proxy = Proxy()
        try:
            async with (
                proxy.endpoint(lambda _session: policy) as endpoint,
                AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client,
            ):
                return await use(client, endpoint)
        finally:
            await proxy.close()

    return asyncio.run(main())


def test_a_reply_comes_back_whole() -> None:
    async def use(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("gpt-any")).id == "gpt-any"
        reply = await client.chat.completions.create(model="any", messages=[{"role": "developer", "content": "hi"}])
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("hello", "stop")
        assert reply.model == "any"
        assert reply.usage is not None
        assert endpoint.calls == 1

    policy = ScriptedPolicy(["hello"])
    with_endpoint(policy, use)
    assert [node.message for node in policy.trace.nodes] == [Message("system", "hi"), Message("assistant", "hello")]


def test_tool_calls_and_their_results_go_both_ways() -> None:
    call = ToolCall("call_1", "weather", '{"city": "Bern"}')
    seen: list[list[Message]] = []

    def answer(agent: str, messages: list[Message]) -> str | Message:
        seen.append(messages)
        return Message("assistant", tool_calls=(call,)) if len(seen) == 1 else "sunny"

    async def use(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "weather in Bern?"}]}]
        tools: list[Any] = [WEATHER.to_openai()]
        first = (await client.chat.completions.create(model="m", messages=messages, tools=tools)).choices[0]
        assert first.finish_reason == "tool_calls"
        assert first.message.content is None
        assert first.message.tool_calls is not None
        messages += [
            first.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "sun"},
        ]
        second = (await client.chat.completions.create(model="m", messages=messages, tools=tools)).choices[0]
        assert second.message.content == "sunny"

    policy = ScriptedPolicy(answer)
    with_endpoint(policy, use)
    assert policy.trace.tools == [WEATHER], "a tool is noted once, however often it is offered"
    assert seen[1] == [
        Message("user", "weather in Bern?"),
        Message("assistant", tool_calls=(call,)),
        Message("tool", "sun", tool_call_id="call_1"),
    ]


@pytest.mark.parametrize("usage", [False, True])
def test_streams_add_up_to_the_reply(usage: bool) -> None:
    reply = Message("assistant", "text", (ToolCall("c0", "f", '{"a": 1}'), ToolCall("c1", "g", "{}")))

    async def use(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True, **options
        )
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == "text"
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert [(c.index, c.id, c.function and c.function.arguments) for c in calls] == [
            (0, "c0", '{"a": 1}'),
            (1, "c1", "{}"),
        ]
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
        assert (chunks[-1].usage is not None) == usage

    with_endpoint(ScriptedPolicy([reply]), use)


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[]",
        b'{"messages": []}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": 2}',
        b'{"messages": [{"content": "x"}]}',
        b'{"messages": [{"role": "pope", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}',
    ],
)
def test_what_cannot_be_served_is_refused_and_serving_goes_on(body: bytes) -> None:
    async def use(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        url = f"{endpoint.base_url}/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, data=body) as reply:
            assert reply.status == 400
            assert (await reply.json())["error"]["message"]
        fine = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        assert fine.choices[0].message.content == "fine"
        assert endpoint.calls == 1
        endpoint.check()

    with_endpoint(ScriptedPolicy(["fine"]), use)


TOOLS = [WEATHER.to_openai()]


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("tool_choice", {"tools": TOOLS, "tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
        ("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": False}),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("logit_bias", {"logit_bias": {"5": 101}}),
        ("frequency_penalty", {"frequency_penalty": 2.5}),
        ("presence_penalty", {"presence_penalty": -2.5}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("logprobs", {"logprobs": True}),
        ("modalities", {"modalities": ["text", "audio"]}),
        ("functions", {"functions": [{"name": "f"}]}),
        ("n", {"n": 2}),
    ],
)
def test_nothing_that_would_change_the_reply_is_ignored(param: str, more: dict[str, Any]) -> None:
    async def use(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], **more)
        assert refused.value.param == param and refused.value.request_id
        assert endpoint.calls == 0

    with_endpoint(ScriptedPolicy([]), use)


class Shaped(ScriptedPolicy):
    """Remembers the shapes that were asked for."""

    def __init__(self, *answers: str) -> None:
        super().__init__(answers)
        self.shapes: list[ReplyShape | None] = []

    async def chat(self, *messages: Any, shape: ReplyShape | None = None, **fields: Any) -> Message:
        self.shapes.append(shape)
        if shape is not None and shape.logit_bias.get(5) == 99:
            raise ShapeRefused("there is no token 5", "logit_bias")
        return await super().chat(*messages, **fields)


def test_shapes_reach_the_policy_from_both_apis_and_its_refusals_the_agent() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}

    async def use(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        await client.chat.completions.create(**asked)
        await client.chat.completions.create(
            **asked, response_format=form, presence_penalty=0.5, frequency_penalty=-1, logit_bias={"7": 3}
        )
        text: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
        reply = await client.responses.create(model="m", input="x", text=text)
        assert reply.text.format.name == "n"
        await client.chat.completions.create(**asked, response_format=form, tools=TOOLS)
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(**asked, logit_bias={"5": 99})
        assert refused.value.param == "logit_bias"
        endpoint.check()

    policy = Shaped(*"{}" * 3)
    with_endpoint(policy, use)
    plain, both, format_alone, with_tools, _ = policy.shapes
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert plain is None and format_alone == with_tools == ReplyShape(response_format=form)
    assert both == ReplyShape(
        frequency_penalty=-1, presence_penalty=0.5, logit_bias={7: 3}, response_format=both and both.response_format
    )
    assert both.response_format == form


def test_fields_that_say_nothing_about_the_reply_are_taken() -> None:
    async def use(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            user="me",
            store=False,
            frequency_penalty=0,
            logit_bias={},
            tool_choice="auto",
            parallel_tool_calls=False,
            response_format={"type": "text"},
        )

    with_endpoint(ScriptedPolicy(["fine"]), use)


def test_a_reply_that_was_cut_short_says_so_although_it_calls_a_tool() -> None:
    class Cut(ScriptedPolicy):
        async def chat(self, *messages: Any, **fields: Any) -> Message:
            reply = await super().chat(*messages, **fields)
            self.trace.nodes[-1].finish_reason = "length"
            return reply

    async def use(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        asking: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
        whole = await client.chat.completions.create(**asking)
        stream = await client.chat.completions.create(**asking, stream=True)
        endings = [chunk.choices[0].finish_reason async for chunk in stream]
        assert (whole.choices[0].finish_reason, endings[-1]) == ("length", "length")

    with_endpoint(Cut([Message("assistant", tool_calls=(ToolCall("c", "weather", "{}"),))] * 2), use)


def failing(failure: EpisodeFailure) -> ScriptedPolicy:
    def answer(agent: str, messages: list[Message]) -> str:
        raise failure

    return ScriptedPolicy(answer)


def test_an_engine_that_fails_ends_the_episode_even_if_the_agent_goes_on() -> None:
    async def use(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        with pytest.raises(InternalServerError):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(EpisodeFailure, match="no engine"):
            endpoint.check()

    with_endpoint(failing(EpisodeFailure("engine", "no engine")), use)


def test_a_conversation_that_outgrows_the_context_is_told_as_openai_does() -> None:
    policy = failing(ContextLimit("too long"))

    async def use(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        assert refused.value.code == "context_length_exceeded"
        endpoint.check()

    with_endpoint(policy, use)
    assert policy.trace.truncated


def test_an_endpoint_answers_only_to_its_own_secret_and_only_while_its_episode_lasts() -> None:
    async def main() -> None:
        proxy = Proxy()
        async with proxy.endpoint(lambda _session: ScriptedPolicy(["a"])) as endpoint:
            guess = endpoint.base_url.replace(endpoint.api_key, "x" * len(endpoint.api_key))
            async with AsyncOpenAI(base_url=guess, api_key="x", max_retries=0) as client:
                with pytest.raises(NotFoundError):
                    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            with pytest.raises(NotFoundError):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        await proxy.close()

    asyncio.run(main())


class Slow(ScriptedPolicy):
    """Never answers, and says when it was cancelled."""

    def __init__(self) -> None:
        super().__init__([])
        self.asked, self.cancelled = asyncio.Event(), asyncio.Event()

    async def chat(self, *_: Any, **__: Any) -> Message:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError


@pytest.mark.parametrize("how", ["the caller leaves", "the episode ends"])
def test_replies_that_nobody_waits_for_are_cancelled(how: str) -> None:
    async def main() -> None:
        proxy, policy = Proxy(), Slow()
        async with AsyncOpenAI(base_url="http://unset", api_key="k", max_retries=0) as client:
            async with proxy.endpoint(lambda _session: policy) as endpoint:
                client.base_url = endpoint.base_url
                call = asyncio.create_task(
                    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
                )
                await policy.asked.wait()
                if how == "the caller leaves":
                    call.cancel()
                    await policy.cancelled.wait()
            await policy.cancelled.wait()
            if how == "the episode ends":
                with pytest.raises(APIError):
                    await call
        await proxy.close()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_sessions_tell_the_agents_of_one_episode_apart() -> None:
    async def main() -> None:
        proxy, root = Proxy(), ScriptedPolicy(lambda agent, _messages: f"I am {agent}")
        async with (
            proxy.endpoint(lambda session: root.agent(session) if session else root) as endpoint,
            AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client,
        ):
            for session in ("", "alice", "bob"):
                headers = {"X-Session-ID": session} if session else {}
                reply = await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "who?"}], extra_headers=headers
                )
                assert reply.choices[0].message.content == f"I am {session or 'policy'}"
        await proxy.close()

    asyncio.run(main())
