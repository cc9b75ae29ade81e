"""Echo on conversations as they are recorded: which tokens its cross-entropy counts."""

import pytest
from handmade_groups import make_group
from tokenizers import Tokenizer

from headway.algorithms.registry import make_algorithm
from headway.config import algorithms as settings_of
from headway.core.episodes import Trace
from headway.core.messages import Message
from headway.core.samples import Sample
from headway.envs.tree import Reply, TraceTree
from headway.models.tiny_tokenizer import tiny_tokenizer
from headway.rendering.chatml import ChatMLRenderer

CALL = '<tool_call>\n{"name": "get", "arguments": {"k": "a"}}\n</tool_call>'
REPLIES = "<|im_start|>user\n<tool_response>\nb\n</tool_response>\n<tool_response>\nc\n</tool_response><|im_end|>\n"


@pytest.fixture
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def test_all_of_a_tools_reply_counts_and_nothing_beside_it(tokenizer: Tokenizer) -> None:
    group = make_group(conversation(tokenizer, 1.0), conversation(tokenizer, 0.0))
    make_algorithm(settings_of.Echo(roles={"tool": 0.1})).score(group)
    for _, sample in group.samples():
        assert counted(tokenizer, sample) == REPLIES
        assert not (sample.sampled & (sample.ce_weight > 0)).any()


def test_roles_are_chosen(tokenizer: Tokenizer) -> None:
    group = make_group(conversation(tokenizer, 1.0), conversation(tokenizer, 0.0))
    make_algorithm(settings_of.Echo(roles={"user": 0.5})).score(group)
    assert {counted(tokenizer, sample) for _, sample in group.samples()} == {"<|im_start|>user\na<|im_end|>\n"}


def conversation(tokenizer: Tokenizer, reward: float) -> Trace:
    """A question, two calls at once, their two results, an answer."""
    tree = TraceTree(ChatMLRenderer(tokenizer))
    messages = [Message("user", "a")]
    asked = tree.record(tree.prompt(messages), said(tokenizer, f"{CALL}\n{CALL}"))
    results = [Message("tool", text, tool_call_id=call.id) for text, call in zip("bc", asked.tool_calls, strict=True)]
    messages += [asked, *results]
    tree.record(tree.prompt(messages), said(tokenizer, "bc"))
    tree.trace.reward = reward
    return tree.trace


def said(tokenizer: Tokenizer, text: str) -> Reply:
    ids = tokenizer.encode(f"{text}<|im_end|>").ids
    return Reply(ids, [-0.5] * len(ids), [(0, len(ids))], "stop")


def counted(tokenizer: Tokenizer, sample: Sample) -> str:
    return str(tokenizer.decode(sample.token_ids[sample.ce_weight > 0].tolist(), skip_special_tokens=False))
