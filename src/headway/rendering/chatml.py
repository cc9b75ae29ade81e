"""ChatML (`<|im_start|>`) rendered natively, without a template; conversations are extended by appending."""

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from headway.core.errors import HeadwayError
from headway.core.messages import Message, Tool
from headway.rendering.base import Rendered, Segment, TokenizerRenderer
from headway.rendering.replies import parse_reply
from headway.rendering.styles import STYLES, Style

CACHED_TEXTS, CACHED_LENGTH = 512, 8192
"""Episodes of a group share their prompt, so the tokens of short texts are cached."""


class ChatMLRenderer(TokenizerRenderer):
    """Renders in `style`. The tokenizer must know `<|im_start|>` and `<|im_end|>`."""

    def __init__(self, tokenizer: Tokenizer, style: Style = STYLES["chatml"]) -> None:
        super().__init__(tokenizer, _stops(tokenizer))
        self.style = style
        self._cached = lru_cache(CACHED_TEXTS)(self.encode)
        self._end = self._stops[0]
        self._open_think, self._close_think = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")
        self._newline = self.encode("\n")
        self._header = self.encode("<|im_start|>assistant\n")
        self._prompt = self.encode("<|im_start|>assistant\n" + style.opening)

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
        return parse_reply(self._reply_text(token_ids), thinking=self.style.opening.endswith("<think>\n"))

    def _closing(self, token_ids: Sequence[int], reply: int) -> list[int] | None:
        """Tokens that end the turn that `token_ids` stop in: a newline, and before it what a cut-off reply lacks."""
        spoken = token_ids[-reply:] if reply else token_ids
        thinks = self._open_think in spoken and self._close_think not in spoken
        if token_ids[-1] == self._end:
            return None if thinks else self._newline  # the template cannot express a reply that is all reasoning
        if token_ids[-1] in self._stops:
            return None  # the template would have had another end-of-turn token in its place
        unclosed = self.encode("\n</think>\n\n") if thinks else []
        return [*unclosed, self._end, *self._newline]

    def _turns(self, messages: Sequence[Message], start: int) -> list[Segment]:
        """Render the turns of `messages[start:]`. Tool messages in a row share one turn."""
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
        return _plain(self._cached(text) if len(text) <= CACHED_LENGTH else self.encode(text), index)

    def _assistant_turn(self, text: str, index: int) -> Segment:
        """Encode header, text and end apart, as they are when the model samples the reply."""
        spoken = [*self.encode(text), self._end]
        token_ids = [*self._header, *spoken, *self._newline]
        content = [False] * len(self._header) + [True] * len(spoken) + [False] * len(self._newline)
        return Segment(token_ids, index, content)

    def _tool_turn(self, messages: Sequence[Message], start: int) -> list[Segment]:
        parts = [f"\n<tool_response>\n{message.content}\n</tool_response>" for message in messages]
        parts[0] = "<|im_start|>user" + parts[0]
        parts[-1] += "<|im_end|>\n"
        return [_plain(ids, start + i) for i, ids in enumerate(split_encode(self.tokenizer, parts))]


def _stops(tokenizer: Tokenizer) -> list[int]:
    """End of turn, and end of text where there is one. Raises HeadwayError for a tokenizer without ChatML's tokens."""
    for text in ("<|im_start|>", "<|im_end|>"):
        if tokenizer.token_to_id(text) is None:
            raise HeadwayError(f"the tokenizer has no {text}: the model does not use ChatML; set model.renderer")
    found = [tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>")]
    return [token for token in found if token is not None]


def split_encode(tokenizer: Tokenizer, parts: Sequence[str]) -> list[list[int]]:
    """Tokenize the joined `parts` and assign each token to the part it begins in: merges across parts are kept."""
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
