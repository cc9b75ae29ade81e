"""One agent's conversations as a tree of tokens, grown by appending wherever the renderer allows it."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headway.core.episodes import Node, RoutedExperts, Trace
from headway.core.messages import Message, Tool, ToolCall
from headway.rendering.base import Rendered, Renderer, Segment
from headway.rendering.replies import call_id


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end in the sampled reply of node `leaf`."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    leaf: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens for the engine, and the branch that its reply will extend: `rendered` comes after node `parent`. Routed
    experts of the first `routed` tokens are recorded there already."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    parent: int
    rendered: Rendered
    first_message: int
    token_ids: list[int]
    rewrites: bool
    routed: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens as the engine sampled them, with logprobs and versions."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]
    finish_reason: str
    temperature: float = 1.0
    routed_experts: RoutedExperts | None = None


class TraceTree:
    """Builds one `Trace`. `prompt` changes nothing, `record` adds the prompt's nodes and the reply's at once."""

    def __init__(self, renderer: Renderer, agent: str = "policy") -> None:
        self.trace = Trace(agent=agent)
        self._renderer = renderer
        self._conversations: list[Conversation] = []
        self._children: dict[int, list[int]] = {}  # unsampled ones, which may be shared

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """The tokens that ask for the next reply to `messages`.

        They extend the longest recorded conversation that `messages` continue, token by token as they were
        sampled; where there is none, or the template would rewrite it, they are rendered anew. What is rendered
        anew may still begin with those very tokens, and then it extends them after all.
        """
        messages, tools = tuple(messages), tuple(tools)
        known = self._longest(messages, tools)
        if known is None:
            return self._anew(messages, tools, self._renderer.render(messages, tools, generation_prompt=True))
        start, before = len(known.messages), self._tokens(known.leaf)
        reply = len(self.trace.nodes[known.leaf].token_ids)
        extension = self._renderer.extend(before, messages[start:], tools, reply=reply, history=known.messages)
        if extension is None:
            rendered = self._renderer.render(messages, tools, generation_prompt=True)
            if rendered.token_ids[: len(before)] != before:
                return self._anew(messages, tools, rendered)
            extension = _after(rendered, len(before), start)
        tokens, routed = before + extension.token_ids, self._routed(known.leaf)
        return Prompt(messages, tools, known.leaf, extension, start, tokens, False, routed)

    def _anew(self, messages: tuple[Message, ...], tools: tuple[Tool, ...], rendered: Rendered) -> Prompt:
        return Prompt(messages, tools, -1, rendered, 0, rendered.token_ids, self._said_before(messages))

    def _routed(self, leaf: int) -> int:
        """Count the tokens of a branch from its root on whose routed experts are recorded."""
        records = [self.trace.nodes[index].routed_experts for index in self.trace.path(leaf)]
        return max((record.end for record in records if record is not None), default=0)

    def _tokens(self, leaf: int) -> list[int]:
        return [token for index in self.trace.path(leaf) for token in self.trace.nodes[index].token_ids]

    def record(self, prompt: Prompt, reply: Reply) -> Message:
        """Add `reply` to the tree; returns it as a message."""
        nodes = self.trace.nodes
        parent = self._grow(prompt)
        leaf = len(nodes)
        message = self._renderer.parse(reply.token_ids, prompt.tools)
        if message.tool_calls:
            calls = tuple(_unique(call, index, leaf) for index, call in enumerate(message.tool_calls))
            message = msgspec.structs.replace(message, tool_calls=calls)
        nodes.append(
            Node(
                parent,
                reply.token_ids,
                message,
                reply.logprobs,
                reply.versions,
                reply.routed_experts,
                reply.finish_reason,
                reply.temperature,
            )
        )
        self.trace.rewrites += prompt.rewrites
        self.trace.truncated |= reply.finish_reason == "length"
        self._conversations.append(Conversation((*prompt.messages, message), prompt.tools, leaf))
        return message

    def _grow(self, prompt: Prompt) -> int:
        """Add the nodes of `prompt`; returns the last. A message whose tokens fell to a neighbour keeps a node."""
        new = prompt.messages[prompt.first_message :]
        parent, placed = prompt.parent, 0
        for number, segment in enumerate(prompt.rendered.segments, start=1):
            final = number == len(prompt.rendered.segments)
            until = segment.message if segment.message is not None else len(new) if final else placed
            for message in new[placed:until]:
                parent = self._child(parent, [], message)
            placed = max(placed, until)
            if segment.message is not None:
                parent = self._child(parent, segment.token_ids, new[segment.message])
                placed = segment.message + 1
            elif segment.token_ids:
                parent = self._child(parent, segment.token_ids, None)
        return parent

    def _child(self, parent: int, token_ids: list[int], message: Message | None) -> int:
        """The node after `parent` with these unsampled tokens; an equal one that exists is shared."""
        siblings = self._children.setdefault(parent, [])
        for index in siblings:
            node = self.trace.nodes[index]
            if node.token_ids == token_ids and node.message == message:
                return index
        siblings.append(len(self.trace.nodes))
        self.trace.nodes.append(Node(parent, token_ids, message))
        return siblings[-1]

    def _longest(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Conversation | None:
        best = None
        for known in reversed(self._conversations):
            longer = best is None or len(known.messages) > len(best.messages)
            if longer and known.tools == tools and _continues(messages, known.messages):
                best = known
        return best

    def _said_before(self, messages: tuple[Message, ...]) -> bool:
        """Tell whether `messages` hold a reply that was sampled here: rendering them anew rewrites history."""
        replies = [known.messages[-1] for known in self._conversations]
        return any(m.role == "assistant" and any(_same(m, reply) for reply in replies) for m in messages)


def _unique(call: ToolCall, index: int, node: int) -> ToolCall:
    """An id that the model itself wrote stays; one that was made up becomes unique in the trace."""
    return msgspec.structs.replace(call, id=f"call_{node}_{index}") if call.id == call_id(index) else call


def _after(rendered: Rendered, tokens: int, messages: int) -> Rendered:
    """`rendered` without its first `tokens`; messages are counted from number `messages` on."""
    segments = []
    for segment in rendered.segments:
        skipped = min(tokens, len(segment.token_ids))
        tokens -= skipped
        if skipped < len(segment.token_ids):
            place = -1 if segment.message is None else segment.message - messages
            owner = place if place >= 0 else None
            segments.append(Segment(segment.token_ids[skipped:], owner, segment.content[skipped:]))
    return Rendered(segments)


def _continues(messages: tuple[Message, ...], known: tuple[Message, ...]) -> bool:
    if len(messages) <= len(known):
        return False
    return all(_same(a, b) for a, b in zip(messages, known, strict=False))


def _same(said: Message, recorded: Message) -> bool:
    """Equal, or equal but for reasoning that the caller left out, as clients of the OpenAI API do."""
    if said is recorded or said == recorded:
        return True
    if said.role != "assistant" or said.reasoning is not None or recorded.reasoning is None:
        return False
    return said == msgspec.structs.replace(recorded, reasoning=None)
