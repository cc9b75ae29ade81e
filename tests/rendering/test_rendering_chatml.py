"""Native ChatML: equal to the templates it stands for, extended by appending, read back without loss."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.messages import Message, Tool, ToolCall
from headway.models.tiny_tokenizer import CHAT_TEMPLATE, save_tiny_tokenizer, tiny_tokenizer
from headway.rendering.chatml import STYLES, ChatMLRenderer, split_encode
from headway.rendering.template import ChatTemplate

TOKENIZER = tiny_tokenizer()
TEMPLATE = ChatTemplate(CHAT_TEMPLATE, {})
PARAMETERS = {"a": {"type": "integer"}, "how": {"type": "string", "enum": ["x", "y"]}, "what": {}}
ADD = Tool("add", "Adds.", {"type": "object", "properties": PARAMETERS, "required": ["a"]})
CALL = ToolCall("call_0", "add", '{"a": 1}')

# A reply that starts with a newline is tokenized as the model would have said it, apart from its header.
texts = st.text(st.sampled_from("ab \n<>é☂{}\"'"), max_size=12)
spoken = texts.map(lambda text: text.lstrip("\n"))


@st.composite
def conversations(draw) -> list[Message]:
    messages = [Message("system", draw(texts))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        role = draw(st.sampled_from(["user", "assistant", "tool", "system"]))
        if role == "assistant":
            calls = (CALL,) * draw(st.integers(0, 2))
            reasoning = draw(st.none() | spoken)
            messages.append(Message("assistant", draw(spoken), calls, reasoning=reasoning))
        else:
            messages.append(Message(role, draw(texts)))
    return messages


@settings(max_examples=150, deadline=None)
@given(conversations(), st.booleans(), st.booleans())
def test_native_chatml_writes_what_the_template_writes(messages, with_tools, prompt):
    tools = (ADD, Tool("bare")) if with_tools else ()
    ours = ChatMLRenderer(TOKENIZER).render(messages, tools, generation_prompt=prompt)
    text = TEMPLATE.text(messages, tools, generation_prompt=prompt)
    assert ours.token_ids == TOKENIZER.encode(text, add_special_tokens=False).ids
    owners = [segment.message for segment in ours.segments if segment.message is not None]
    assert owners == list(range(len(messages)))


def test_the_tiny_tokenizer_is_a_hugging_face_one(tmp_path):
    transformers = pytest.importorskip("transformers", reason="compares with transformers, a development extra")
    size = save_tiny_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [
        Message("system", "rules"),
        Message("user", "1+1?"),
        Message("assistant", "hm", (CALL,), reasoning="think"),
        Message("tool", "2", tool_call_id="call_0"),
    ]
    ids = theirs.apply_chat_template(
        [m.to_openai() for m in messages], tools=[ADD.to_openai()], add_generation_prompt=True, return_dict=False
    )
    assert ids == ChatMLRenderer(TOKENIZER).render(messages, (ADD,), generation_prompt=True).token_ids
    assert len(theirs) == size == TOKENIZER.get_vocab_size()
    assert theirs.eos_token == "<|im_end|>"


@pytest.mark.parametrize("reasoning", [None, "because"])
def test_the_qwen3_dialect_agrees_with_an_independent_renderer(reasoning):
    pytest.importorskip("renderers", reason="an optional extra")
    from headway.rendering.external import ExternalRenderer

    theirs, ours = ExternalRenderer(TOKENIZER, "qwen3"), ChatMLRenderer(TOKENIZER, STYLES["qwen3"])
    said = Message("assistant", "hm", (CALL,), reasoning=reasoning)
    messages = [Message("system", "rules"), Message("user", "1+1?"), said, Message("tool", "2"), Message("tool", "3")]
    for stop in range(1, len(messages) + 1):
        for tools in ((), (ADD,)):
            prompt = messages[stop - 1].role != "assistant"
            a = ours.render(messages[:stop], tools, generation_prompt=prompt)
            b = theirs.render(messages[:stop], tools, generation_prompt=prompt)
            assert ours.decode(a.token_ids) == ours.decode(b.token_ids)
    longer = [*messages, Message("assistant", "2", reasoning=reasoning), Message("user", "sure?")]
    assert ours.decode(ours.render(longer).token_ids) == ours.decode(theirs.render(longer).token_ids)


def test_tiny_tokenizers_tell_of_tools_by_their_signatures():
    text = STYLES["chatml"].system_text("Rules.", (ADD, Tool("bare")))
    assert text.startswith("Rules.\n<tools>\nadd(a: integer, how?: x|y, what?: any) Adds.\nbare()\n</tools>\n")


def test_extending_appends_what_rendering_everything_would_have_written():
    renderer = ChatMLRenderer(TOKENIZER)
    history = [Message("user", "ask")]
    prompt = renderer.render(history, (ADD,), generation_prompt=True).token_ids
    reply = [*renderer.encode("answer"), *renderer.stop_token_ids[:1]]
    new = [Message("tool", "x"), Message("tool", "y"), Message("user", "more")]
    extension = renderer.extend([*prompt, *reply], new, (ADD,), reply=len(reply))
    everything = [*history, Message("assistant", "answer"), *new]
    whole = renderer.render(everything, (ADD,), generation_prompt=True).token_ids
    assert [*prompt, *reply, *extension.token_ids] == whole
    assert [s.message for s in extension.segments] == [None, 0, 1, 2, None]


def test_a_reply_that_was_cut_off_is_closed_by_tokens_nobody_sampled():
    renderer = ChatMLRenderer(TOKENIZER)
    prompt = renderer.render([Message("user", "ask")], generation_prompt=True).token_ids
    new = [Message("user", "more")]
    for said, closed in (("ans", "<|im_end|>\n"), ("<think>\nhm", "\n</think>\n\n<|im_end|>\n")):
        reply = renderer.encode(said)
        extension = renderer.extend([*prompt, *reply], new, reply=len(reply))
        assert renderer.decode(extension.segments[0].token_ids) == closed


def test_extending_is_refused_where_the_template_would_have_other_tokens():
    renderer = ChatMLRenderer(TOKENIZER)
    end, other = renderer.stop_token_ids
    prompt = renderer.render([Message("user", "ask")], generation_prompt=True).token_ids
    new = [Message("user", "more")]
    other_end = [*prompt, *renderer.encode("answer"), other]
    only_thought = [*prompt, *renderer.encode("<think>hm"), end]
    assert renderer.extend(other_end, new, reply=7) is None
    assert renderer.extend(only_thought, new, reply=4) is None
    assert renderer.extend([*prompt, end], [], reply=1) is None


def test_a_family_that_drops_old_reasoning_starts_anew_at_the_next_question():
    renderer = ChatMLRenderer(TOKENIZER, STYLES["qwen3"])
    end = renderer.stop_token_ids[0]
    prompt = renderer.render([Message("user", "ask")], generation_prompt=True).token_ids
    thought = [*renderer.encode("<think>\nhm\n</think>\n\nanswer"), end]
    plain = [*renderer.encode("answer"), end]
    question, result = [Message("user", "more")], [Message("tool", "x")]
    assert renderer.extend([*prompt, *thought], question, reply=len(thought)) is None
    assert renderer.extend([*prompt, *thought], result, reply=len(thought)) is not None
    assert renderer.extend([*prompt, *plain], question, reply=len(plain)) is not None


def test_the_spoken_part_of_a_message_is_what_the_model_would_sample():
    renderer = ChatMLRenderer(TOKENIZER)
    said = Message("assistant", "hm", (CALL,), reasoning="so")
    (segment,) = renderer.render([said]).segments
    spoken_ids = [t for t, mine in zip(segment.token_ids, segment.content, strict=True) if mine]
    text = f'<think>\nso\n</think>\n\nhm\n<tool_call>\n{{"name": "add", "arguments": {CALL.arguments}}}\n</tool_call>'
    assert renderer.decode(spoken_ids) == text + "<|im_end|>"


@settings(max_examples=100, deadline=None)
@given(
    spoken.filter(lambda t: t == t.strip("\n") and "<t" not in t),
    st.none() | spoken.filter(lambda t: t == t.strip("\n")),
    st.lists(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=3), max_size=3),
)
def test_replies_are_read_back_as_they_were_rendered(content, reasoning, arguments):
    renderer = ChatMLRenderer(TOKENIZER)
    calls = tuple(ToolCall(f"call_{i}", "add", json.dumps(a, ensure_ascii=False)) for i, a in enumerate(arguments))
    if calls and not content.strip():
        content = ""
    said = Message("assistant", content, calls, reasoning=reasoning)
    (segment,) = renderer.render([said]).segments
    spoken_ids = [t for t, mine in zip(segment.token_ids, segment.content, strict=True) if mine]
    assert renderer.parse(spoken_ids) == said


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add"',
        "</tool_call><tool_call>",
    ],
)
def test_malformed_calls_stay_in_the_content(text):
    reply = ChatMLRenderer(TOKENIZER).parse(ChatMLRenderer(TOKENIZER).encode(text))
    assert reply.content == text
    assert not reply.tool_calls


def test_a_good_call_beside_a_bad_one_is_kept():
    good = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    reply = ChatMLRenderer(TOKENIZER).parse(ChatMLRenderer(TOKENIZER).encode(good + "<tool_call>oops</tool_call>"))
    assert [call.arguments for call in reply.tool_calls] == ['{"a": 1}']
    assert reply.content == "<tool_call>oops</tool_call>"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=5))
def test_parts_share_out_the_tokens_of_the_whole(parts):
    dealt = split_encode(TOKENIZER, parts)
    whole = TOKENIZER.encode("".join(parts), add_special_tokens=False).ids
    assert [token for part in dealt for token in part] == whole
