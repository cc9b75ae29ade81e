"""Families of the `renderers` package behind our interface."""

import pytest
from family_tokens import BRIDGES_TOOL, BRIDGES_USER, FAMILIES, family_tokenizer

from headway.base.errors import HeadwayError
from headway.core.messages import Message, Tool
from headway.models.tiny_tokenizer import tiny_tokenizer
from headway.rendering.external import ExternalRenderer

pytest.importorskip("renderers", reason="an optional extra")

TOKENIZER = family_tokenizer()
ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


def asked(renderer):
    prompt = renderer.render([Message("user", "ask")], (ADD,), generation_prompt=True).token_ids
    reply = [*renderer.encode("answer"), renderer.stop_token_ids[0]]
    return [*prompt, *reply], len(reply)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_renders_parses_and_marks_the_spoken_part(family):
    renderer = ExternalRenderer(TOKENIZER, family)
    messages = [Message("user", "ask"), Message("assistant", "answer")]
    rendered = renderer.render(messages)
    said = [t for s in rendered.segments for t, mine in zip(s.token_ids, s.content, strict=True) if mine]
    assert "answer" in renderer.decode(said)
    assert "ask" not in renderer.decode(said)
    reply = renderer.parse([*renderer.encode("</think>answer"), renderer.stop_token_ids[0]])
    assert reply.role == "assistant"
    assert "answer" in reply.content


@pytest.mark.parametrize("family", BRIDGES_USER)
def test_a_question_is_appended(family):
    renderer = ExternalRenderer(TOKENIZER, family)
    tokens, reply = asked(renderer)
    extension = renderer.extend(tokens, [Message("user", "more")], (ADD,), reply=reply)
    assert "more" in renderer.decode(extension.token_ids)
    assert 0 in [segment.message for segment in extension.segments]


@pytest.mark.parametrize("family", BRIDGES_TOOL)
def test_a_tool_result_is_appended(family):
    renderer = ExternalRenderer(TOKENIZER, family)
    tokens, reply = asked(renderer)
    result = Message("tool", "found", tool_call_id="call_0", name="add")
    extension = renderer.extend(tokens, [result], (ADD,), reply=reply)
    assert "found" in renderer.decode(extension.token_ids)


def test_extending_needs_to_know_what_the_reply_was():
    renderer = ExternalRenderer(TOKENIZER, "prime-qwen3")
    tokens, _ = asked(renderer)
    assert renderer.extend(tokens, [Message("user", "more")]) is None


def test_a_tokenizer_of_another_family_is_refused_in_one_line():
    with pytest.raises(HeadwayError, match='renderer "llama-3" does not fit this tokenizer'):
        ExternalRenderer(tiny_tokenizer(), "llama-3")
