"""OpenAI's Responses and Anthropic's Messages at the agents' endpoint, called with the vendors' own clients."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest

from headway.core.messages import Message, ToolCall
from headway.envs.agents.proxy import Endpoint, Proxy
from headway.envs.policy import ContextLimit, EpisodeFailure, Policy, ScriptedPolicy

if TYPE_CHECKING:
    import anthropic

REPLY = Message(
    "assistant", "I look.", (ToolCall("c1", "look", '{"at":  "it"}'), ToolCall("c2", "wait", "{}")), reasoning="hm"
)
RESULTS = [Message("tool", "a cat", tool_call_id="c1"), Message("tool", "", tool_call_id="c2")]
ASKED = [Message("system", "Be brief."), Message("user", "What is it?")]
HISTORY = [*ASKED, REPLY, *RESULTS, Message("user", "So?")]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}


def with_endpoint(policy: Policy, use: Callable[[Endpoint], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        proxy = Proxy()
        try:
            async with proxy.endpoint(lambda _session: policy) as endpoint:
                return await use(endpoint)
        finally:
            await proxy.close()

    return asyncio.run(main())


class Listening(ScriptedPolicy):
    """Gives REPLY, then text, and keeps what it was asked."""

    def __init__(self) -> None:
        self.heard: list[list[Message]] = []
        super().__init__(self.listen)

    def listen(self, agent: str, messages: list[Message]) -> Message:
        self.heard.append(messages)
        return Message("assistant", "A cat.") if messages[-1].content == "So?" else REPLY


def openai_client(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


def anthropic_client(endpoint: Endpoint) -> "anthropic.AsyncAnthropic":
    # Takes seconds to import, which a worker that runs other files need not spend.
    import anthropic

    return anthropic.AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key, max_retries=0)


def items(response: Any) -> list[dict[str, Any]]:
    """A response's output without what differs from call to call, or is the client's own."""
    kept = ("type", "status", "name", "call_id", "arguments")
    return [
        {name: getattr(item, name, None) for name in kept}
        | {"texts": [part.text for part in getattr(item, "content", None) or ()]}
        for item in response.output
    ]


def test_responses_stream_what_they_would_return_and_their_items_go_back_unchanged() -> None:
    async def use(endpoint: Endpoint) -> None:
        async with openai_client(endpoint) as client:
            asking: dict[str, Any] = {
                "model": "m",
                "instructions": "Be brief.",
                "tools": [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}],
            }
            whole = await client.responses.create(**asking, input="What is it?")
            async with client.responses.stream(**asking, input="What is it?") as stream:
                names = [event.type async for event in stream]
                streamed = await stream.get_final_response()
            assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
            assert (whole.output_text, whole.status) == ("I look.", "completed")
            assert items(streamed) == items(whole)
            assert names[0] == "response.created" and names[-1] == "response.completed"
            results = [
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a cat"}]},
                {"type": "function_call_output", "call_id": "c2", "output": ""},
                {"role": "user", "content": "So?"},
            ]
            said = [item.model_dump(exclude_none=True) for item in whole.output]
            question = {"role": "user", "content": [{"type": "input_text", "text": "What is it?"}]}
            await client.responses.create(**asking, input=[question, *said, *results])
            last = await client.responses.create(**asking, input=results, previous_response_id=streamed.id)
            assert last.output_text == "A cat."
            assert last.usage is not None and last.usage.total_tokens == 0  # a script has no tokens

    policy = Listening()
    with_endpoint(policy, use)
    assert policy.heard == [ASKED, ASKED, HISTORY, HISTORY]


def test_messages_stream_what_they_would_return_and_their_blocks_go_back_unchanged() -> None:
    async def use(endpoint: Endpoint) -> None:
        async with anthropic_client(endpoint) as client:
            asking: dict[str, Any] = {
                "model": "m",
                "max_tokens": 64,
                "system": [{"type": "text", "text": "Be brief."}],
                "tools": [{"name": "look", "description": "Look at it.", "input_schema": SCHEMA}],
            }
            question = {"role": "user", "content": "What is it?"}
            whole = await client.messages.create(**asking, messages=[question])
            async with client.messages.stream(**asking, messages=[question]) as stream:
                streamed = await stream.get_final_message()
            assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert whole.stop_reason == "tool_use"
            uses = [block.input for block in whole.content if block.type == "tool_use"]
            assert uses == [{"at": "it"}, {}]
            kept = {"content", "stop_reason", "usage", "role", "model"}
            assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
            assert streamed.model_dump(include=kept - {"content"}) == whole.model_dump(include=kept - {"content"})
            results = [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a cat"}]},
                {"type": "tool_result", "tool_use_id": "c2"},
                {"type": "text", "text": "So?"},
            ]
            history = [question, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
            last = await client.messages.create(**asking, messages=history)
            assert [block.text for block in last.content if block.type == "text"] == ["A cat."]
            assert last.stop_reason == "end_turn"

    policy = Listening()
    with_endpoint(policy, use)
    assert policy.heard == [ASKED, ASKED, HISTORY]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
QUESTION = {"role": "user", "content": "x"}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
    ("responses", {"input": [{"type": "computer_call"}]}, "computer_call"),
    ("responses", {"input": [{"type": "function_call", "name": "f"}]}, "malformed"),
    ("responses", {"input": []}, "no messages"),
    ("responses", {"input": [{"role": "pope", "content": "x"}]}, "pope"),
    ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
    ("responses", {"input": "x", "tool_choice": "required"}, "tool_choice"),
    ("responses", {"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ("responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format"),
    ("responses", {"input": "x", "truncation": "auto"}, "truncation"),
    ("responses", {"input": "x", "background": True}, "background"),
    ("responses", {"input": "x", "previous_response_id": "resp_0"}, "resp_0"),
    ("messages", {"messages": [{"role": "user", "content": [IMAGE]}]}, "image"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}]}]},
        "image",
    ),
    ("messages", {"messages": [{"role": "user"}]}, "malformed"),
    ("messages", {"messages": []}, "no messages"),
    ("messages", {"messages": [{"role": "pope", "content": "x"}]}, "pope"),
    ("messages", {"messages": [QUESTION, {"role": "assistant", "content": "I"}]}, "begun"),
    ("messages", {"messages": [QUESTION], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash"),
    ("messages", {"messages": [QUESTION], "tool_choice": {"type": "any"}}, "tool_choice"),
    (
        "messages",
        {
            "messages": [QUESTION],
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
        "parallel_tool_calls",
    ),
    ("messages", {"messages": [QUESTION], "output_config": {"format": {"type": "json_schema"}}}, "output_config"),
]


def test_what_cannot_be_served_is_refused_with_its_name() -> None:
    async def use(endpoint: Endpoint) -> None:
        async with aiohttp.ClientSession() as session:
            for route, body, word in REFUSED:
                async with session.post(f"{endpoint.base_url}/{route}", json={"max_tokens": 8, **body}) as reply:
                    error = (await reply.json())["error"]
                    assert reply.status in (400, 404), body
                    assert word in f"{error['message']} {error.get('param')}", (body, error)
        assert endpoint.calls == 0

    with_endpoint(ScriptedPolicy([]), use)


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (ContextLimit("9 tokens"), "BadRequestError"),
        (EpisodeFailure("engine", "no engine"), "InternalServerError"),
    ],
)
def test_failures_reach_each_client_as_its_own(failure: EpisodeFailure, error: str) -> None:
    import anthropic

    def answer(agent: str, messages: list[Message]) -> str:
        raise failure

    async def use(endpoint: Endpoint) -> None:
        async with openai_client(endpoint) as client:
            with pytest.raises(getattr(openai, error)) as refused:
                await client.responses.create(model="m", input="x")
        async with anthropic_client(endpoint) as other:
            with pytest.raises(getattr(anthropic, error)) as told:
                await other.messages.create(model="m", max_tokens=8, messages=[{"role": "user", "content": "x"}])
        if isinstance(failure, ContextLimit):
            assert refused.value.code == "context_length_exceeded"
            assert "prompt is too long" in str(told.value)

    with_endpoint(ScriptedPolicy(answer), use)


def test_arguments_that_are_no_object_are_wrapped_and_come_back_as_they_were() -> None:
    odd = Message("assistant", tool_calls=(ToolCall("c", "look", "[1,"),))
    heard: list[list[Message]] = []

    def answer(agent: str, messages: list[Message]) -> Message:
        heard.append(messages)
        return odd

    async def use(endpoint: Endpoint) -> None:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                body = {"max_tokens": 8, "messages": messages}
                async with session.post(f"{endpoint.base_url}/messages", json=body) as reply:
                    content = (await reply.json())["content"]
                    assert content[0]["input"] == {"INVALID_JSON": "[1,"}
                result = {"type": "tool_result", "tool_use_id": "c", "content": "?"}
                messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]

    with_endpoint(ScriptedPolicy(answer), use)
    assert heard[1][1] == odd
