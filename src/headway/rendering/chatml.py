"""ChatML, natively: conversations of the `<|im_start|>` families as tokens, extended by appending."""

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from headway.core.errors import HeadwayError
from headway.core.messages import Message, Tool
from headway.rendering.base import Rendered, Segment
from headway.rendering.replies import parse_reply
from headway.rendering.styles import STYLES, Style

CACHED_TEXTS, CACHED_LENGTH = 512, 8192
"""Episodes of a group share their prompt, so tokens of texts that are not too long are kept."""


class ChatMLRenderer:
    """Renders in `style`. The tokenizer must know `<|im_start|>` and `<|im_end|>`."""

    def __init__(self, tokenizer: Tokenizer, style: Style = STYLES["chatml"]) -> None:
        self.tokenizer = tokenizer
        self.style = style
        self._cached = lru_cache(CACHED_TEXTS)(self._tokens)
        self._start, self._end = self._mark("<|im_start|>"), self._mark("<|im_end|>")
        extra = tokenizer.token_to_id("<|endoftext|>")
        self._stops = [self._end] if extra is None else [self._end, extra]
        self._open_think, self._close_think = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
        self._newline = self._tokens("\n")
        self._header = self._tokens("<|im_start|>assistant\n")
        self._prompt = self._tokens("<|im_start|>assistant\n" + style.opening)

    @property
    def stop_token_ids(self) -> list[int]:
        return list(self._stops)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = False
    ) -> Rendered:
        segments = []
        first = messages[0] if messages and messages[0].role == "system" else None
        system = self.style.system_text(first.content if first else None, tools)
        if system is not None:
            segments.append(self._turn("system", system, 0 if first else None))
        segments += self._turns(messages, 1 if first else 0)
        if generation_prompt:
            segments.append(_plain(self._prompt, None))
        return Rendered(segments)

    def extend(
        self,
        token_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        reply: int = 0,
        history: Sequence[Message] = (),
    ) -> Rendered | None:
        if not token_ids or not new_messages:
            return None
        asked = any(message.role == "user" for message in new_messages)
        if self.style.reasoning == "drop" and asked and self._close_think in token_ids:
            return None
        closing = self._closing(token_ids, reply)
        if closing is None:
            return None
        segments = [_plain(closing, None), *self._turns(new_messages, 0), _plain(self._prompt, None)]
        return Rendered(segments)

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool] = ()) -> Message:
        ids = list(token_ids)
        while ids and ids[-1] in self._stops:
            ids.pop()
        return parse_reply(self.decode(ids), thinking=self.style.opening.endswith("<think>\n"))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        return self._tokens(text)

    def _closing(self, token_ids: Sequence[int], reply: int) -> list[int] | None:
        """What ends the turn that `token_ids` stop in: a newline, and before it what a cut-off reply lacks."""
        spoken = token_ids[-reply:] if reply else token_ids
        thinks = self._open_think in spoken and self._close_think not in spoken
        if token_ids[-1] == self._end:
            return None if thinks else self._newline  # a reply that is all thought has no place in the template
        if token_ids[-1] in self._stops:
            return None  # the template would have had another end-of-turn token in its place
        unclosed = self._tokens("\n</think>\n\n") if thinks else []
        return [*unclosed, self._end, *self._newline]

    def _turns(self, messages: Sequence[Message], start: int) -> list[Segment]:
        """Turns of `messages[start:]`. Tool messages in a row share one turn."""
        asked = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
        segments: list[Segment] = []
        index = start
        while index < len(messages):
            message = messages[index]
            if message.role == "tool":
                stop = index
                while stop < len(messages) and messages[stop].role == "tool":
                    stop += 1
                segments += self._tool_turn(messages[index:stop], index)
                index = stop
                continue
            if message.role == "assistant":
                last = index == len(messages) - 1
                text = self.style.assistant_text(message, current=index > asked, last=last)
                segments.append(self._assistant_turn(text, index))
            else:
                segments.append(self._turn(message.role, message.content, index))
            index += 1
        return segments

    def _turn(self, role: str, content: str, index: int | None) -> Segment:
        text = f"<|im_start|>{role}\n{content}<|im_end|>\n"
        return _plain(self._cached(text) if len(text) <= CACHED_LENGTH else self._tokens(text), index)

    def _assistant_turn(self, text: str, index: int) -> Segment:
        """Header, text and end are encoded apart: that is how tokens stand when the model itself speaks."""
        spoken = [*self._tokens(text), self._end]
        token_ids = [*self._header, *spoken, *self._newline]
        content = [False] * len(self._header) + [True] * len(spoken) + [False] * len(self._newline)
        return Segment(token_ids, index, content)

    def _tool_turn(self, messages: Sequence[Message], start: int) -> list[Segment]:
        parts = [f"\n<tool_response>\n{message.content}\n</tool_response>" for message in messages]
        parts[0] = "<|im_start|>user" + parts[0]
        parts[-1] += "<|im_end|>\n"
        return [_plain(ids, start + i) for i, ids in enumerate(split_encode(self.tokenizer, parts))]

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _mark(self, text: str) -> int:
        token = self.tokenizer.token_to_id(text)
        if token is None:
            raise HeadwayError(f"the tokenizer has no {text}: it is not of a ChatML family; set model.renderer")
        return token


def split_encode(tokenizer: Tokenizer, parts: Sequence[str]) -> list[list[int]]:
    """Tokens of the joined `parts`, dealt to the part that each begins in: merges across parts stay as they are."""
    if len(parts) == 1:
        return [tokenizer.encode(parts[0], add_special_tokens=False).ids]
    encoding = tokenizer.encode("".join(parts), add_special_tokens=False)
    out: list[list[int]] = [[] for _ in parts]
    part, end = 0, len(parts[0])
    for token, (begin, _) in zip(encoding.ids, encoding.offsets, strict=True):
        while begin >= end and part < len(parts) - 1:
            part += 1
            end += len(parts[part])
        out[part].append(token)
    return out


def _plain(token_ids: list[int], message: int | None) -> Segment:
    return Segment(token_ids, message, [False] * len(token_ids))
