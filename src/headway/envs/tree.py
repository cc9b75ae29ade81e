"""One agent's conversations as a tree of tokens, grown by appending wherever the renderer allows it."""

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headway.core.episodes import Node, RoutedExperts, Trace
from headway.core.growing import Growing
from headway.core.images import ImageUse
from headway.core.messages import Message, Tool, ToolCall
from headway.core.prefixes import PromptNames
from headway.rendering.base import Rendered, Renderer, Segment, check_sees
from headway.rendering.replies import call_id


@dataclass(frozen=True, slots=True)
class KeptBy:
    """The engine at `url` keeps prompt and reply under `name`: what follows can be sent alone."""

    url: str
    name: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end in the sampled reply of node `leaf`, and their tokens. Routed experts of the first `routed`
    tokens are recorded. `kept_by` is where an engine keeps the tokens, `names` are those of their blocks, and `images`
    those that tokens are placeholders of."""

    messages: Growing[Message]
    tools: tuple[Tool, ...]
    leaf: int
    token_ids: Growing[int]
    routed: int
    kept_by: "KeptBy | None"
    names: PromptNames
    images: tuple[ImageUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens for the engine, and the branch that its reply will extend: `rendered` comes after node `parent`. Routed
    experts of the first `routed` tokens are recorded there already, and `kept_by` has the first `kept` tokens. `images`
    are those that tokens are placeholders of, and `image_bytes` their encoded bytes, by digest."""

    messages: Growing[Message]
    tools: tuple[Tool, ...]
    parent: int
    rendered: Rendered
    first_message: int
    token_ids: Growing[int]
    rewrites: bool
    routed: int = 0
    kept: int = 0
    kept_by: KeptBy | None = None
    names: PromptNames = field(default_factory=PromptNames)
    images: tuple[ImageUse, ...] = ()
    image_bytes: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens as the engine sampled them, with logprobs and versions. `kept_by` has them after those of the prompt."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]
    finish_reason: str
    temperature: float = 1.0
    routed_experts: RoutedExperts | None = None
    kept_by: KeptBy | None = None


class TraceTree:
    """Builds one `Trace`. `prompt` changes nothing, `record` adds the prompt's nodes and the reply's at once."""

    def __init__(self, renderer: Renderer, agent: str = "policy") -> None:
        self.trace = Trace(agent=agent)
        self._renderer = renderer
        self._conversations: list[Conversation] = []  # the longest last
        self._children: dict[int, list[int]] = {}  # unsampled ones, which may be shared
        self.images: dict[str, bytes] = {}
        """Encoded bytes of the images so far, by digest."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """The tokens that ask for the next reply to `messages`.

        They extend the longest recorded conversation that `messages` continue, token by token as they were
        sampled; where there is none, or the template would rewrite it, they are rendered anew. What is rendered
        anew may still begin with those very tokens, and then it extends them after all. Raises ValueError for images
        that can't be taken.
        """
        check_sees(self._renderer, messages)
        tools = tuple(tools)
        known = self._longest(messages, tools)
        if known is None:
            return self._anew(messages, tools, self._renderer.render(messages, tools, generation_prompt=True))
        start, before = len(known.messages), known.token_ids
        new, reply = messages[start:], len(self.trace.nodes[known.leaf].token_ids)
        extension = self._renderer.extend(before, new, tools, reply=reply, history=known.messages)
        if extension is None:
            rendered = self._renderer.render(messages, tools, generation_prompt=True)
            if not before.begins(rendered.token_ids):
                return self._anew(messages, tools, rendered)
            extension = _after(rendered, len(before), start)
        said = known.messages.extended(new) if known.messages.begins(messages) else Growing(messages)
        return Prompt(
            said,
            tools,
            known.leaf,
            extension,
            start,
            before.extended(extension.token_ids),
            False,
            known.routed,
            len(before),
            known.kept_by,
            PromptNames(known.names),
            (*known.images, *_later(extension.images, len(before))),
            self._image_bytes(messages),
        )

    def _anew(self, messages: Sequence[Message], tools: tuple[Tool, ...], rendered: Rendered) -> Prompt:
        said, tokens = Growing(messages), Growing(rendered.token_ids)
        rewrites, images = self._said_before(messages), self._image_bytes(messages)
        return Prompt(said, tools, -1, rendered, 0, tokens, rewrites, images=tuple(rendered.images), image_bytes=images)

    def _image_bytes(self, messages: Sequence[Message]) -> dict[str, bytes]:
        return {image.digest: image.data for message in messages for image in message.images}

    def record(self, prompt: Prompt, reply: Reply) -> Message:
        """Add `reply` to the tree; returns it as a message."""
        nodes = self.trace.nodes
        self.images.update(prompt.image_bytes)
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
        self.trace.offer(prompt.tools)
        self.trace.truncated |= reply.finish_reason == "length"
        routed = prompt.routed if reply.routed_experts is None else max(prompt.routed, reply.routed_experts.end)
        said, tokens = prompt.messages.extended([message]), prompt.token_ids.extended(reply.token_ids)
        conversation = Conversation(
            said, prompt.tools, leaf, tokens, routed, reply.kept_by, prompt.names, prompt.images
        )
        insort(self._conversations, conversation, key=lambda known: len(known.messages))
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
                parent = self._child(parent, segment.token_ids, new[segment.message], list(segment.images))
                placed = segment.message + 1
            elif segment.token_ids:
                parent = self._child(parent, segment.token_ids, None)
        return parent

    def _child(
        self, parent: int, token_ids: list[int], message: Message | None, images: Sequence[ImageUse] = ()
    ) -> int:
        """The node after `parent` with these unsampled tokens; an equal one that exists is shared."""
        if message is not None and message.images:
            message = message.without_bytes()
        siblings = self._children.setdefault(parent, [])
        for index in siblings:
            node = self.trace.nodes[index]
            if node.token_ids == token_ids and node.message == message:
                return index
        siblings.append(len(self.trace.nodes))
        self.trace.nodes.append(Node(parent, token_ids, message, images=list(images)))
        return siblings[-1]

    def _longest(self, messages: Sequence[Message], tools: tuple[Tool, ...]) -> Conversation | None:
        for known in reversed(self._conversations):
            if len(messages) > len(known.messages) and known.tools == tools and repeats(messages, known.messages):
                return known
        return None

    def _said_before(self, messages: Sequence[Message]) -> bool:
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
            images = tuple(_later([image for image in segment.images if image.at >= skipped], -skipped))
            segments.append(Segment(segment.token_ids[skipped:], owner, segment.content[skipped:], images))
    return Rendered(segments)


def _later(images: Sequence[ImageUse], tokens: int) -> list[ImageUse]:
    """The images as they stand after so many more tokens."""
    return [ImageUse(image.at + tokens, image.tokens, image.digest) for image in images]


def repeats(messages: Sequence[Message], known: Growing[Message]) -> bool:
    """Tell whether `messages` begin with those of `known`, except for reasoning that may be left out."""
    if len(messages) < len(known):
        return False
    return known.begins(messages) or all(_same(a, b) for a, b in zip(messages, known, strict=False))


def _same(said: Message, recorded: Message) -> bool:
    """Equal, or equal but for reasoning that the caller left out, as clients of the OpenAI API do."""
    if said is recorded or said == recorded:
        return True
    if said.role != "assistant" or said.reasoning is not None or recorded.reasoning is None:
        return False
    return said == msgspec.structs.replace(recorded, reasoning=None)
