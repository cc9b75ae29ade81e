"""The renderer's contract: messages become tokens, tokens become messages, conversations grow by appending."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer

from headway.core.images import ImageUse
from headway.core.messages import Message, Tool, count_images

History = Sequence[Message]
Tools = Sequence[Tool]
TokenIds = Sequence[int]

_LONG = 8192
"""Characters from which a text is encoded as a batch of one: slower to start, but other threads run meanwhile."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one message (`message` is its index), or of none (`message` None): a generation prompt, tokens
    that close a reply, a system turn that the template adds by itself.

    `content` marks, within an assistant message, the tokens that the model itself would have sampled
    (its text, calls and end-of-turn), as opposed to the template around them. `images` are counted from its first
    token.
    """

    token_ids: list[int]
    message: int | None
    content: list[bool]
    images: tuple[ImageUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Rendered:
    segments: list[Segment]

    @property
    def token_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def images(self) -> list[ImageUse]:
        """The images, counted from the first token."""
        found, start = list[ImageUse](), 0
        for segment in self.segments:
            found += [ImageUse(start + image.at, image.tokens, image.digest) for image in segment.images]
            start += len(segment.token_ids)
        return found


class Renderer(Protocol):
    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a reply."""
        ...

    def render(self, messages: History, tools: Tools = (), *, generation_prompt: bool = False) -> Rendered:
        """Render the whole conversation, from its first token."""
        ...

    def extend(
        self, token_ids: TokenIds, new_messages: History, tools: Tools = (), *, reply: int = 0, history: History = ()
    ) -> Rendered | None:
        """Render what follows `token_ids` (which end with a sampled reply of `reply` tokens) so that the model answers
        `new_messages`: closing tokens that the reply lacks, the messages, the generation prompt.

        `history` are the messages of `token_ids`, the reply included. None where appending cannot be proven equal to
        the template: the caller starts a new branch.
        """
        ...

    def parse(self, token_ids: TokenIds, tools: Tools = ()) -> Message:
        """Read a sampled reply as an assistant message. Malformed tool calls stay in the content, never raise."""
        ...

    def decode(self, token_ids: TokenIds) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Tokenize plain text, without special tokens added."""
        ...


class TokenizerRenderer:
    """The base of renderers over a tokenizer. `stops` are the tokens that end a reply."""

    call_mark: str | None = "<tool_call>"
    """The text that opens a call of a tool; None where it is not known."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self._stops = list(stops)

    @property
    def stop_token_ids(self) -> list[int]:
        return list(self._stops)

    def decode(self, token_ids: TokenIds) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        if len(text) < _LONG:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @property
    def thinking(self) -> bool:
        """True where the prompt opens the reasoning, so that a reply begins inside it."""
        return False

    def _reply_text(self, token_ids: TokenIds) -> str:
        """The text of a reply without the tokens that end it."""
        ids = list(token_ids)
        while ids and ids[-1] in self._stops:
            ids.pop()
        return self.decode(ids)


def check_sees(renderer: Renderer, messages: History) -> None:
    """Raise ValueError where messages hold images, and the renderer's model does not see."""
    if count_images(messages) and not getattr(renderer, "sees", False):
        raise ValueError("the messages hold images, but this model does not see")


NO_CALL_TOKEN = (
    "response_format can't go with tools, as no single token opens a call of this model's: set tool_choice to none"
)


def reasoning_end(renderer: Renderer) -> int | None:
    """The token that ends the reasoning where the prompt opens it; None where a reply begins with its content."""
    if not getattr(renderer, "thinking", False):
        return None
    token_ids = renderer.encode("</think>")
    return token_ids[0] if len(token_ids) == 1 else None


def call_token(renderer: Renderer) -> int | None:
    """The token that opens a call of a tool; None where calls are not opened by one token."""
    token_ids = renderer.encode(getattr(renderer, "call_mark", None) or "")
    return token_ids[0] if len(token_ids) == 1 else None


def template_message(message: Message) -> dict[str, Any]:
    """Write a message as OpenAI does, except that calls' arguments are objects, as chat templates expect."""
    plain = message.to_openai()
    for call in plain.get("tool_calls", ()):
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError:
            continue
        if isinstance(arguments, dict):
            call["function"]["arguments"] = arguments
    return plain
