"""The renderer's contract: messages become tokens, tokens become messages, conversations grow by appending."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.core.messages import Message, Tool


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one message (`message` is its index), or of none (`message` None): a generation prompt, tokens
    that close a reply, a system turn that the template adds by itself.

    `content` marks, within an assistant message, the tokens that the model itself would have sampled
    (its text, calls and end-of-turn), as opposed to the template around them.
    """

    token_ids: list[int]
    message: int | None
    content: list[bool]


@dataclass(frozen=True, slots=True)
class Rendered:
    segments: list[Segment]

    @property
    def token_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]


class Renderer(Protocol):
    @property
    def stop_token_ids(self) -> list[int]: ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = False
    ) -> Rendered:
        """The whole conversation from its first token."""
        ...

    def extend(
        self,
        token_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        reply: int = 0,
        history: Sequence[Message] = (),
    ) -> Rendered | None:
        """What to append to `token_ids` (which end with a sampled reply of `reply` tokens) so that `new_messages`
        follow and the model may speak: closing tokens that the reply lacks, the messages, the generation prompt.

        `history` are the messages that `token_ids` stand for, the reply included. None where appending cannot
        be proven equal to what the template means: the caller starts a new branch.
        """
        ...

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool] = ()) -> Message:
        """A sampled reply as an assistant message. Malformed tool calls stay in the content, never raise."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Plain text, without special tokens added."""
        ...
