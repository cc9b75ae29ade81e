"""The rule that tokens are the truth: what was sampled is trained verbatim, once, and nothing else is."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.core.episodes import Episode, RoutedExperts, Task
from headway.core.messages import Message, Tool, ToolCall
from headway.envs.rewards import conversation
from headway.envs.samples import episode_samples, trace_samples
from headway.envs.tree import Reply, TraceTree
from headway.models.tiny_tokenizer import CHAT_TEMPLATE
from headway.rendering.chatml import STYLES, ChatMLRenderer
from headway.rendering.external import ExternalRenderer
from headway.rendering.template import ChatTemplate, TemplateRenderer

sys.path.append(str(Path(__file__).parent.parent / "rendering"))
from family_tokens import FAMILIES, family_tokenizer

TOKENIZER = family_tokenizer()
END = TOKENIZER.token_to_id("<|im_end|>")
MARKS = [TOKENIZER.token_to_id(t) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>", "user\n")]
TOOL = Tool("look", "Looks.", {"type": "object", "properties": {"key": {"type": "string"}}})


def trimming_template():
    trims = CHAT_TEMPLATE.replace("{{- message.content or '' }}", "{{- message.content | trim }}")
    return TemplateRenderer(TOKENIZER, ChatTemplate(trims, {}), [END])


RENDERERS = {
    **{f"chatml-{name}": ChatMLRenderer(TOKENIZER, style) for name, style in STYLES.items()},
    "fallback": TemplateRenderer(TOKENIZER, ChatTemplate(CHAT_TEMPLATE, {}), [END]),
    "fallback-trims": trimming_template(),
    **{family: ExternalRenderer(TOKENIZER, family) for family in FAMILIES},
}


class Sampler:
    """Gives every sampled token a logprob of its own, so that each can be found again."""

    def __init__(self) -> None:
        self.calls = []
        self._count = 0

    def reply(self, prompt, token_ids, version, temperature) -> Reply:
        logprobs = [-(self._count + i + 1) / 1024 for i in range(len(token_ids))]
        self._count += len(token_ids)
        self.calls.append((list(prompt.token_ids), token_ids, logprobs, version))
        return Reply(token_ids, logprobs, [(version, len(token_ids))], "stop", temperature)


# Bytes in any order, so that most replies are not what a tokenizer would have made of their text.
tokens = st.lists(st.integers(97, 100) | st.sampled_from([10, 32, 195, 169, *MARKS]), max_size=8)
steps = st.fixed_dictionaries(
    {
        "tokens": tokens,
        "cut_off": st.booleans(),
        "then": st.sampled_from(["user", "tool", "both"]),
        "text": st.text(st.sampled_from("xy \n☂"), max_size=4),
        "move": st.sampled_from(["go on", "go on", "go on", "fork", "drop", "again"]),
        "temperature": st.sampled_from([1.0, 1.0, 0.7]),
    }
)


def play(renderer, plan, tools) -> tuple[TraceTree, Sampler]:
    """Talk with `renderer` as `plan` says: going on, forking an earlier conversation, dropping old messages,
    or asking the same thing again."""
    tree, sampler = TraceTree(renderer), Sampler()
    start = [Message("system", "rules"), Message("user", "ask")]
    asked, current = [start], start
    for number, step in enumerate(plan):
        try:
            prompt = tree.prompt(current, tools)
        except Exception:  # a family may refuse a conversation; nothing is recorded then
            break
        ids = [*step["tokens"], *([] if step["cut_off"] else renderer.stop_token_ids[:1])]
        said = tree.record(prompt, sampler.reply(prompt, ids or [98], number, step["temperature"]))
        result = Message("tool", step["text"], tool_call_id="call_0", name="look")
        follow = {"user": [Message("user", step["text"])], "tool": [result], "both": [result, Message("user", "so?")]}
        history = {
            "go on": current,
            "fork": asked[number // 2 % len(asked)],
            "drop": [current[0], *current[2:]],
            "again": current,
        }[step["move"]]
        current = history if step["move"] == "again" else [*history, said, *follow[step["then"]]]
        asked.append(current)
    return tree, sampler


@pytest.mark.parametrize("name", RENDERERS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=st.lists(steps, min_size=1, max_size=6), with_tools=st.booleans())
def test_every_sampled_token_is_trained_verbatim_and_once(name, plan, with_tools):
    tree, sampler = play(RENDERERS[name], plan, (TOOL,) if with_tools else ())
    assert tree.trace.tools == ([TOOL] if with_tools and tree.trace.nodes else [])
    samples = episode_samples(Episode("e", "g", "env", Task("t"), traces=[tree.trace]))
    found = {}
    for sample in samples:
        assert not sample.logprobs[~sample.sampled].any()
        assert (sample.versions[~sample.sampled] == -1).all()
        for place in np.flatnonzero(sample.sampled):
            key = float(sample.logprobs[place])
            assert key not in found, "a token is marked as sampled twice"
            found[key] = (sample, int(place))
    for prompt, ids, logprobs, version in sampler.calls:
        for offset, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            sample, place = found.pop(float(np.float32(logprob)))
            assert sample.token_ids[place] == token
            assert sample.versions[place] == version
            seen = [*prompt, *ids[:offset]]
            assert sample.token_ids[:place].tolist() == seen, "the engine saw other tokens before this one"
    assert not found, "something else is marked as sampled"


@pytest.mark.parametrize("name", ["chatml-chatml", "chatml-hermes", "fallback", "kimi-k2", "llama-3"])
def test_a_plain_conversation_is_one_branch(name):
    plan = [
        {"tokens": [97, 98], "cut_off": False, "then": "user", "text": "x", "move": "go on", "temperature": 1.0}
    ] * 4
    tree, sampler = play(RENDERERS[name], plan, ())
    assert len(sampler.calls) == 4
    assert len(tree.trace.branches()) == 1
    assert tree.trace.rewrites == 0


@pytest.mark.parametrize("name", RENDERERS)
def test_each_call_extends_the_tokens_of_the_one_before_or_counts_as_a_rewrite(name):
    step = {"tokens": [97, 98], "cut_off": False, "then": "user", "text": "x", "move": "go on", "temperature": 1.0}
    tree, sampler = play(RENDERERS[name], [step] * 3, ())
    assert len(sampler.calls) == 3
    appended = 0
    for (before, said, *_), (after, *_) in zip(sampler.calls, sampler.calls[1:], strict=False):
        appended += after[: len(before) + len(said)] == [*before, *said]
    assert appended + tree.trace.rewrites == 2
    assert len(tree.trace.branches()) == 1 + tree.trace.rewrites


def test_all_messages_can_be_read_back_from_the_tree():
    step = {"tokens": [97], "cut_off": False, "then": "both", "text": "x", "move": "go on", "temperature": 1.0}
    for name in ("chatml-chatml", "fallback", "qwen3"):
        tree, _ = play(RENDERERS[name], [step, step], (TOOL,))
        roles = [message.role for message in conversation(tree.trace)]
        assert roles == ["system", "user", "assistant", "tool", "user", "assistant"], name


def test_parallel_replies_share_their_prompt():
    tree, sampler = TraceTree(RENDERERS["chatml-chatml"]), Sampler()
    prompts = [tree.prompt([Message("user", "ask")]) for _ in range(3)]
    for prompt in prompts:
        tree.record(prompt, sampler.reply(prompt, [97, END], 0, 1.0))
    assert len(tree.trace.nodes) == 2 + 3
    assert len(tree.trace.branches()) == 3
    assert tree.trace.rewrites == 0


def test_a_caller_that_leaves_out_reasoning_still_continues_the_conversation():
    renderer = RENDERERS["chatml-chatml"]
    tree, sampler = TraceTree(renderer), Sampler()
    prompt = tree.prompt([Message("user", "ask")])
    ids = [*renderer.encode("<think>\nhm\n</think>\n\nanswer"), END]
    tree.record(prompt, sampler.reply(prompt, ids, 0, 1.0))
    following = tree.prompt([Message("user", "ask"), Message("assistant", "answer"), Message("user", "more")])
    assert following.token_ids[: len(prompt.token_ids) + len(ids)] == [*prompt.token_ids, *ids]


def test_other_tools_or_other_words_start_a_new_branch():
    tree, sampler = TraceTree(RENDERERS["chatml-chatml"]), Sampler()
    prompt = tree.prompt([Message("user", "ask")])
    said = tree.record(prompt, sampler.reply(prompt, [97, END], 0, 1.0))
    conversation_ = [Message("user", "ask"), said, Message("user", "more")]
    assert tree.prompt(conversation_).parent >= 0
    with_tools = tree.prompt(conversation_, (TOOL,))
    assert with_tools.parent == -1
    assert with_tools.rewrites
    reworded = tree.prompt([Message("user", "ask"), Message("assistant", "b"), Message("user", "more")])
    assert reworded.parent == -1
    assert not reworded.rewrites


def test_calls_get_ids_of_their_own():
    renderer = RENDERERS["chatml-chatml"]
    tree, sampler = TraceTree(renderer), Sampler()
    text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    ids = [*renderer.encode(text + text), END]
    messages = [Message("user", "ask")]
    seen = []
    for _ in range(2):
        prompt = tree.prompt(messages, (TOOL,))
        said = tree.record(prompt, sampler.reply(prompt, ids, 0, 1.0))
        seen += [call.id for call in said.tool_calls]
        messages += [said, *(Message("tool", "x", tool_call_id=call.id) for call in said.tool_calls)]
    assert len(set(seen)) == 4
    assert all(isinstance(call, ToolCall) for call in said.tool_calls)


def test_ids_that_the_model_wrote_itself_stay():
    renderer = RENDERERS["kimi-k2"]
    tree, sampler = TraceTree(renderer), Sampler()
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    prompt = tree.prompt([Message("user", "ask")], (TOOL,))
    said = tree.record(prompt, sampler.reply(prompt, [*renderer.encode(text), renderer.stop_token_ids[0]], 0, 1.0))
    assert [(call.id, call.name) for call in said.tool_calls] == [("functions.look:0", "look")]


def test_spans_and_paths_tell_which_message_a_token_belongs_to():
    step = {"tokens": [97], "cut_off": False, "then": "tool", "text": "x", "move": "go on", "temperature": 1.0}
    tree, _ = play(RENDERERS["chatml-chatml"], [step, step], (TOOL,))
    (sample,) = trace_samples(tree.trace)
    spans = tree.trace.spans(sample.nodes)
    assert spans[-1][2] == len(sample)
    roles = [node.message.role for node, start, end in spans if node.message is not None and end > start]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


def test_experts_of_the_first_computation_win():
    tree = TraceTree(RENDERERS["chatml-chatml"])
    messages = [Message("user", "ask")]
    length = 0
    for turn in range(2):
        prompt = tree.prompt(messages)
        assert prompt.routed == length
        length = len(prompt.token_ids) + 1  # the last sampled token was never fed to the model
        choices = np.full((length, 2, 1), turn, dtype=np.int8)
        experts = RoutedExperts(choices.tobytes(), choices.shape, 0, "int8")
        said = tree.record(prompt, Reply([97, END], [-1.0, -1.0], [(0, 2)], "stop", 1.0, experts))
        messages += [said, Message("user", "more")]
    (sample,) = trace_samples(tree.trace)
    by_token = sample.routed_experts[:, 0, 0].tolist()
    first = len(tree.trace.nodes[0].token_ids) + len(tree.trace.nodes[1].token_ids) + 1
    assert by_token == [0] * first + [1] * (len(sample) - first - 1) + [-1]


def test_versions_that_do_not_cover_a_reply_are_an_error():
    tree = TraceTree(RENDERERS["chatml-chatml"])
    tree.record(tree.prompt([Message("user", "ask")]), Reply([97, END], [-1.0, -1.0], [(0, 1)], "stop"))
    with pytest.raises(ValueError, match="versions cover 1 of 2"):
        trace_samples(tree.trace)
