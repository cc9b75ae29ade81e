"""Each rule of context management: the messages it shows, the branches it makes, the tokens that are trained."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.algorithms.base import Group, Rollout
from headway.algorithms.grpo import Grpo
from headway.config.context import DropOld, KeepLast, Summarize, TokenBudget
from headway.config.orchestrator import EnvSettings
from headway.core.episodes import Episode, Task
from headway.core.messages import Message, Messages, ToolCall, as_messages
from headway.core.samples import Sample
from headway.envs.base import ToolUse, tool
from headway.envs.context import rules
from headway.envs.context.policy import ManagedPolicy
from headway.envs.policy import ContextLimit, Policy, ScriptedPolicy, Tools
from headway.envs.samples import episode_samples
from headway.envs.tools import describe
from headway.envs.tree import Reply, TraceTree
from headway.models.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer
from headway.rendering.chatml import ChatMLRenderer
from headway.rendering.template import ChatTemplate

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from turn_parts.server import logprob

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.token_to_id("<|im_end|>")
RULES = {
    # Calls and notes stay: where they alone are too long, every turn is rewritten.
    "keep_last": (KeepLast(outputs=2, above=8192), 70, 1800, 60),
    "drop_old": (DropOld(turns=4, above=8192), 500, 160, 20),
    "budget": (TokenBudget(tokens=2048, above=8192), 500, 160, 20),
    "summarize": (Summarize(turns=1, above=8192), 500, 160, 20),
}
"""Each rule with turns and the size of a tool's output, about 131 thousand tokens in all, and the most rewrites."""


def look(number: int, output: str = "") -> list[Message]:
    """A turn: a call and what came of it."""
    call = ToolCall(f"call_{number}", "look", f'{{"page": {number}}}')
    text = output or f"the text of page {number}, all of it"
    return [Message("assistant", "", (call,)), Message("tool", text, tool_call_id=f"call_{number}")]


OPENING = [Message("system", "be brief"), Message("user", "read")]
THREE = [*OPENING, *look(1), *look(2), *look(3)]


class TreePolicy(Policy):
    """Records tokens as the policy does that engines sample for; its replies and their logprobs are scripted."""

    def __init__(self, reply: Callable[[list[Message]], str], context: int = 1 << 20) -> None:
        self.tree = TraceTree(ChatMLRenderer(TOKENIZER))
        super().__init__(self.tree.trace)
        self.reply, self.context = reply, context
        self.prompts: list[list[Message]] = []

    async def chat(self, messages: Messages, tools: Tools = (), **_sampling: object) -> Message:
        said = as_messages(messages)
        prompt = self.tree.prompt(said, [describe(tool) for tool in tools])
        if len(prompt.token_ids) >= self.context:
            raise ContextLimit("too long")
        self.prompts.append(said)
        ids = [*TOKENIZER.encode(self.reply(said)).ids, END]
        start = len(prompt.token_ids)
        logprobs = [logprob(token, start + i) for i, token in enumerate(ids)]
        return self.tree.record(prompt, Reply(ids, logprobs, [(0, len(ids))], "stop"))

    def another(self, name: str) -> Policy:
        return TreePolicy(self.reply, self.context)

    def count_tokens(self, messages: Messages, tools: Tools = ()) -> int:
        return len(self.tree.prompt(as_messages(messages), [describe(tool) for tool in tools]).token_ids)


class Pages(ToolUse):
    """Reads one page a turn, for as long as it may."""

    system = "be brief"

    def __init__(self, turns: int, size: int = 160) -> None:
        self.max_turns, self._size = turns, size

    def tasks(self):
        return [Task("0")]

    def prompt(self, task):
        return "read"

    @tool
    async def look(self, page: int) -> str:
        """Read a page."""
        return f"page {page:04d} " + "." * self._size


def script() -> Callable[[list[Message]], str]:
    """Calls `look` with the next page each time; summarizes when it is asked to."""
    pages = iter(range(1, 1 << 20))

    def reply(messages: list[Message]) -> str:
        if rules.ASK_SUMMARY in messages[-1].content:
            return f"I have read up to page {messages[-2].content[5:9]}."
        return f'reading\n<tool_call>\n{{"name": "look", "arguments": {{"page": {next(pages)}}}}}\n</tool_call>'

    return reply


def play(rule, turns: int, size: int = 160, context: int = 1 << 20) -> tuple[TreePolicy, list[Sample]]:
    inner = TreePolicy(script(), context)
    asyncio.run(Pages(turns, size).run(Task("0"), ManagedPolicy(inner, rule)))
    return inner, episode_samples(Episode("e", "g", "pages", Task("0"), traces=[inner.trace]))


def texts(inner: TreePolicy) -> list[str]:
    """The branches of a trace, written out."""
    nodes = inner.trace.nodes
    branches = [[token for i in path for token in nodes[i].token_ids] for path in inner.trace.branches()]
    return [TOKENIZER.decode(tokens, skip_special_tokens=False) for tokens in branches]


def test_keep_last_replaces_old_outputs_and_nothing_else():
    shown = rules.keep_last(THREE, 1)
    assert [m.content for m in shown if m.role == "tool"] == [rules.LEFT_OUT, rules.LEFT_OUT, THREE[-1].content]
    assert [m for m in shown if m.role != "tool"] == [m for m in THREE if m.role != "tool"]
    assert [m.tool_call_id for m in shown] == [m.tool_call_id for m in THREE]
    assert rules.keep_last(THREE, 3) == THREE
    short = [*OPENING, *look(1, "ok"), *look(2)]
    assert rules.keep_last(short, 0)[3].content == "ok"


def test_drop_old_keeps_the_opening_and_whole_turns():
    assert rules.drop_old(THREE, 2) == [*OPENING, *look(2), *look(3)]
    assert rules.drop_old(THREE, 3) == rules.drop_old(THREE, 9) == THREE
    assert rules.drop_old(OPENING, 1) == OPENING


@pytest.mark.parametrize(("tokens", "kept"), [(100, 3), (8, 3), (7, 2), (6, 2), (5, 1), (1, 1)])
def test_budget_drops_as_few_turns_as_it_must(tokens, kept):
    turns = [look(1), look(2), look(3)]
    expected = [*OPENING, *(message for turn in turns[3 - kept :] for message in turn)]
    assert rules.fit_budget(THREE, tokens, len) == expected


def test_a_summary_takes_the_place_of_old_turns():
    shown = rules.summarized(OPENING, THREE, 1, " it was long \n")
    told = Message("user", f"read\n\n{rules.SUMMARY}it was long")
    assert shown == [OPENING[0], told, *look(3)]
    assert rules.ask_summary(THREE) == [*THREE, Message("user", rules.ASK_SUMMARY)]
    assert rules.ask_summary(OPENING)[-1].content == f"read\n\n{rules.ASK_SUMMARY}"


def test_keep_last_makes_a_branch_that_begins_with_the_tokens_that_stay():
    inner, samples = play(KeepLast(outputs=1), turns=3, size=20)
    output = "page {} " + "." * 20
    head = "<|im_start|>system\nbe brief\n<tools>"
    call = '<tool_call>\n{{"name": "look", "arguments": {{"page": {}}}}}\n</tool_call>'
    call = f"<|im_start|>assistant\nreading\n{call}<|im_end|>\n"
    shown = "<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n"
    first, second = texts(inner)
    assert first.startswith(head)
    assert first.endswith(call.format(1) + shown.format(output.format("0001")) + call.format(2)[:-1])
    turns = call.format(1) + shown.format(rules.LEFT_OUT) + call.format(2) + shown.format(output.format("0002"))
    assert second.endswith(turns + call.format(3)[:-1])
    # The first reply is shared by both, and counts in the first only.
    said = len(TOKENIZER.encode(call.format(1)).ids) - 3  # without the prompt for it, and the line's end
    assert [int(sample.sampled.sum()) for sample in samples] == [2 * said, said]


def test_a_summary_ends_its_branch_and_begins_the_next():
    inner, samples = play(Summarize(turns=0, above=600), turns=3, size=200)
    first, second = texts(inner)
    summary = "I have read up to page 0002."
    assert first.endswith(f"{rules.ASK_SUMMARY}<|im_end|>\n<|im_start|>assistant\n{summary}<|im_end|>")
    opening = f"<|im_start|>user\nread\n\n{rules.SUMMARY}{summary}<|im_end|>\n<|im_start|>assistant\n"
    assert opening in second
    assert "page 0001" not in second
    assert len(samples) == 2
    assert inner.trace.metrics == {"context_rewrites": 1.0}
    assert not inner.trace.truncated


def test_a_summary_that_does_not_fit_leaves_the_turns_out():
    inner, samples = play(Summarize(turns=1, above=600), turns=4, size=200, context=700)
    assert not any(rules.SUMMARY in text for text in texts(inner))
    assert len(samples) > 1


@pytest.mark.parametrize("name", RULES)
def test_long_episodes_train_what_the_policy_saw_and_no_token_twice(name):
    rule, turns, size, most = RULES[name]
    inner, samples = play(rule, turns, size)
    trace = inner.trace
    rewrites = int(trace.metrics["context_rewrites"])
    assert 4 < rewrites < most
    assert len(samples) == rewrites + 1 == len(trace.branches())
    check_against_the_template(inner, samples)
    for sample in samples:
        places = sample.sampled.nonzero()[0].tolist()
        assert [float(sample.logprobs[i]) for i in places] == pytest.approx(
            [logprob(int(sample.token_ids[i]), i) for i in places]
        )
    said = sum(len(node.token_ids) for node in trace.nodes if node.sampled)
    assert sum(int(sample.sampled.sum()) for sample in samples) == said
    assert len(inner.prompts) == turns + (rewrites if name == "summarize" else 0)
    check_advantages(trace, samples, said)


def check_against_the_template(inner: TreePolicy, samples: list[Sample]) -> None:
    """The tokens of each branch are those of the checkpoint's own template, up to the line's end after a reply."""
    template = ChatTemplate(CHAT_TEMPLATE, {})
    tools = Pages(1).toolbox.tools
    for sample, path in zip(samples, inner.trace.branches(), strict=True):
        messages = [m for i in path if (m := inner.trace.nodes[i].message) is not None]
        again = TOKENIZER.encode(template.text(messages, tools), add_special_tokens=False).ids
        assert again[: len(sample)] == sample.token_ids.tolist()
        assert len(again) - len(sample) <= 1


def check_advantages(trace, samples: list[Sample], said: int) -> None:
    """All branches have the advantage of their episode, and each sampled token counts once."""
    other = Episode("f", "g", "pages", Task("0"), traces=[type(trace)(reward=0.0)])
    trace.reward = 1.0
    mine = Episode("e", "g", "pages", Task("0"), traces=[trace])
    group = Group("g", "pages", Task("0"), [Rollout(mine, samples), Rollout(other, [])])
    Grpo("none", None).score(group)
    assert sum(float(sample.rl_weight.sum()) for sample in samples) == said
    assert {float(a) for sample in samples for a in sample.advantages[sample.sampled]} == {0.5}


def test_a_conversation_that_was_shortened_stays_so():
    shown: list[list[Message]] = []

    def reply(_: str, messages: list[Message]) -> Message:
        shown.append(messages)
        return look(len(shown))[0]

    policy = ManagedPolicy(ScriptedPolicy(reply), DropOld(turns=1))
    asyncio.run(Pages(4).run(Task("0"), policy))
    assert [len(messages) for messages in shown] == [2, 4, 4, 4]
    assert all(messages[:2] == shown[0] for messages in shown)


def test_settings_name_a_rule():
    settings = EnvSettings.model_validate({"id": "calculator", "context": {"type": "keep_last", "outputs": 3}})
    assert settings.context == KeepLast(outputs=3)
    with pytest.raises(ValueError, match="must be at most above"):
        EnvSettings.model_validate({"id": "calculator", "context": {"type": "budget", "tokens": 9, "above": 8}})
