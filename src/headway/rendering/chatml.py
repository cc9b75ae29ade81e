"""ChatML (`<|im_start|>`) rendered natively, without a template; conversations are extended by appending."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from tokenizers import Tokenizer

from headway.base.errors import HeadwayError
from headway.core.messages import Message, Tool
from headway.rendering.base import History, Rendered, Segment, TokenIds, TokenizerRenderer, Tools
from headway.rendering.replies import parse_reply

_HERMES_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_HERMES_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}'
    "\n</tool_call>"
)
_BRIEF_TAIL = '\n</tools>\nCall one: <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'


@dataclass(frozen=True)
class Style:
    """One dialect of ChatML.

    `tools`: how the system turn lists tools; `brief` writes signatures, for tokenizers whose tokens are characters,
    `hermes` the JSON that Qwen models were trained on. `reasoning`: `keep` shows all of it in the history, `drop` only
    what came after the user's last message. `default_system` is used where the conversation has no system message.
    `opening` is what the generation prompt adds after the assistant's header.
    """

    name: str
    tools: Literal["brief", "hermes"] = "hermes"
    reasoning: Literal["keep", "drop"] = "keep"
    default_system: str | None = None
    opening: str = ""

    def system_text(self, system: str | None, tools: Tools) -> str | None:
        """Write the content of the first system turn; None where there is none."""
        if system is None:
            system = self.default_system
        if not tools:
            return system
        if self.tools == "brief":
            text = "\n".join(["<tools>", *map(_signature, tools)]) + _BRIEF_TAIL
            return f"{system}\n{text}" if system else text
        told = [json.dumps(tool.to_openai(), ensure_ascii=False) for tool in tools]
        text = "\n".join([_HERMES_HEAD, *told]) + _HERMES_TAIL
        return text if system is None else f"{system}\n\n{text}"

    def assistant_text(self, message: Message, *, current: bool, last: bool) -> str:
        """Write `message` as the model would have. `current`: no message of the user came after it."""
        text = message.content
        if self.reasoning == "keep":
            if message.reasoning is not None:
                text = f"<think>\n{message.reasoning}\n</think>\n\n{text}"
        elif current and (last or message.reasoning):
            text = f"<think>\n{(message.reasoning or '').strip(chr(10))}\n</think>\n\n{text.lstrip(chr(10))}"
        calls = [
            f'<tool_call>\n{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}}}'
            "\n</tool_call>"
            for call in message.tool_calls
        ]
        joined = "\n".join(calls)
        return f"{text}\n{joined}" if calls and message.content else text + joined


def _signature(tool: Tool) -> str:
    """`name(a: integer, b?: string) What it does.`, where a question mark tells what may be left out."""
    schema = tool.parameters
    required = schema.get("required") or []
    parameters = [
        f"{name}{'' if name in required else '?'}: "
        + ("|".join(map(str, kind["enum"])) if kind.get("enum") else str(kind.get("type") or "any"))
        for name, kind in (schema.get("properties") or {}).items()
    ]
    return f"{tool.name}({', '.join(parameters)})" + (f" {tool.description}" if tool.description else "")


STYLES = {
    style.name: style
    for style in (
        Style("chatml", tools="brief"),
        Style("hermes"),
        Style("qwen2.5", default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
        Style("qwen3", reasoning="drop"),
        Style("qwen3-nothink", reasoning="drop", opening="<think>\n\n</think>\n\n"),
    )
}


def with_default_system(style: Style, system: str | None) -> Style:
    return replace(style, default_system=system)


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

    def render(self, messages: History, tools: Tools = (), *, generation_prompt: bool = False) -> Rendered:
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
        self, token_ids: TokenIds, new_messages: History, tools: Tools = (), *, reply: int = 0, history: History = ()
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

    def parse(self, token_ids: TokenIds, tools: Tools = ()) -> Message:
        return parse_reply(self._reply_text(token_ids), thinking=self.thinking)

    @property
    def thinking(self) -> bool:
        return self.style.opening.endswith("<think>\n")

    def _closing(self, token_ids: TokenIds, reply: int) -> list[int] | None:
        """Tokens that end the turn that `token_ids` stop in: a newline, and before it what a cut-off reply lacks."""
        spoken = token_ids[-reply:] if reply else token_ids
        thinks = self._open_think in spoken and self._close_think not in spoken
        if token_ids[-1] == self._end:
            return None if thinks else self._newline  # the template cannot express a reply that is all reasoning
        if token_ids[-1] in self._stops:
            return None  # the template would have had another end-of-turn token in its place
        unclosed = self.encode("\n</think>\n\n") if thinks else []
        return [*unclosed, self._end, *self._newline]

    def _turns(self, messages: History, start: int) -> list[Segment]:
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

    def _tool_turn(self, messages: History, start: int) -> list[Segment]:
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
