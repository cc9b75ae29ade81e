"""A streamed reply with tools: its deltas add up to what the whole is read as, however it was cut."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.messages import Tool
from headway.core.openai.requests import ChatRequest
from headway.inference.outputs import Choice, Chunk
from headway.inference.server.chat import MessageWriter
from headway.inference.server.context import ServerContext
from headway.inference.server.replies import ReplyStream
from headway.models.tiny_tokenizer import save_tiny_tokenizer
from headway.rendering.load import load_renderer
from headway.rendering.replies import parse_reply


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def put_together(deltas: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls, as a client assembles them."""
    calls: list[list[str]] = []
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", [])):
        if "id" in piece:
            assert piece["index"] == len(calls)
            calls.append([piece["function"]["name"], ""])
        calls[piece["index"]][1] += piece["function"]["arguments"]
    text = ["".join(delta.get(kind, "") for delta in deltas) for kind in ("reasoning_content", "content")]
    return text[0], text[1], [(name, arguments) for name, arguments in calls]


def feed(text: str, sizes: list[int]) -> tuple[ReplyStream, list[dict[str, Any]]]:
    reply, deltas, start = ReplyStream(), [], 0
    for size in sizes:
        deltas.append(reply.feed(text[start : start + size]))
        start += size
    return reply, [*deltas, reply.feed(text[start:], last=True)]


words = st.text(alphabet="ab<>/{ ", min_size=1, max_size=12).filter(lambda text: "<think>" not in text)
arguments = st.sampled_from(["{}", '{"city": "Paris"}', '{"a": [1, {"b": "}\\""}], "c": "</tool"}', '{"x": "é\\\\"}'])
calls = st.builds(call, st.sampled_from(["weather", "look_up"]), arguments)
odd = st.sampled_from(['<tool_call>{"arguments": {"a": 1}, "name": "late"}</tool_call>', "<tool_call>no</tool_call>"])
thoughts = st.sampled_from(["", "<think>\nwell\nnow\n</think>\n\n"])


@settings(max_examples=300, deadline=None)
@given(thoughts, st.lists(words | calls | odd, max_size=4), st.lists(st.integers(1, 9), max_size=40))
def test_deltas_add_up_to_what_the_whole_is_read_as(thought: str, parts: list[str], sizes: list[int]) -> None:
    text = thought + "\n".join(parts)
    whole = parse_reply(text)
    reply, deltas = feed(text, sizes)
    reasoning, content, called = put_together(deltas)
    assert called == [(c.name, c.arguments) for c in whole.tool_calls]
    assert reasoning == (whole.reasoning or "")
    # Line ends around a call are the template's; between two parts of text they are kept by the whole alone.
    assert content.replace("\n", "") == whole.content.replace("\n", "")
    assert reply.calling == bool(whole.tool_calls)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab\n<tol_c", max_size=30), st.lists(st.integers(1, 5), max_size=30))
def test_text_without_calls_is_shown_as_it_is(text: str, sizes: list[int]) -> None:
    assert put_together(feed(text, sizes)[1])[1] == text


def test_only_what_may_be_a_tag_is_held_back() -> None:
    reply = ReplyStream()
    assert reply.feed("2 < 3") == {"content": "2 < 3"}
    assert reply.feed(" <tool") == {"content": " "}
    assert reply.feed("box>\n") == {"content": "<toolbox>"}
    assert reply.feed('<tool_call>{"name": "look", "arg') == {}
    begun = reply.feed('uments": {"key"')["tool_calls"]
    assert begun[0]["function"] == {"name": "look", "arguments": '{"key"'}
    assert reply.feed(': "x"}')["tool_calls"] == [{"index": 0, "function": {"arguments": ': "x"}'}}]
    assert reply.feed("}</tool_call>\n", last=True) == {}
    assert reply.calling


@pytest.mark.parametrize("cut", ['<tool_call>{"na', "<tool_call>", "<tool_c"])
def test_a_call_that_never_got_a_name_is_text(cut: str) -> None:
    reply, deltas = feed(f"Well. {cut}", [3, 4, 5])
    assert put_together(deltas)[1] == f"Well. {cut}" and not reply.calling


def test_a_call_that_was_cut_short_is_not_whole() -> None:
    reply, deltas = feed('<tool_call>{"name": "look", "arguments": {"key": "x', [])
    assert put_together(deltas)[2] == [("look", '{"key": "x')] and not reply.calling


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> ServerContext:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    return ServerContext(load_renderer(folder))


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("tools", [[], [Tool("look")]])
@pytest.mark.parametrize(
    "text",
    [
        "<think>\nwell\n</think>\n\nyes",
        "<think>never closed",
        call("look", '{"key": "x"}'),
        call("look", '{"key": nothing}'),
        '<tool_call>{"name": "look", "arguments": {"key": "x',
        "before " + call("look", "{}") + " after",
    ],
)
def test_a_streamed_reply_is_the_whole_one(context: ServerContext, text: str, tools: list[Tool], reason: Any) -> None:
    tokens = context.renderer.encode(text)
    body = ChatRequest(messages=[])
    choice = Choice(0, tokens, [0.0] * len(tokens), [], [(0, len(tokens))], reason)
    whole = MessageWriter(0, body, context, None, tools).whole(choice)
    writer, deltas = MessageWriter(0, body, context, None, tools), []
    for place, token in enumerate(tokens):
        last = place == len(tokens) - 1
        deltas.append(writer.delta(Chunk(0, [token], [0.0], [], [], reason if last else None)))
    sent = [delta for delta in deltas if delta is not None]
    message = whole["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    assert put_together([delta["delta"] for delta in sent]) == (
        message.get("reasoning_content", ""),
        message["content"] or "",
        calls,
    )
    assert sent[-1]["finish_reason"] == whole["finish_reason"]
    assert bool(calls) <= bool(tools)
