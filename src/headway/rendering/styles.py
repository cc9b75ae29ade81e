"""Dialects of ChatML: how tools are listed, which reasoning stays in the history."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headway.core.messages import Message, Tool

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

    def system_text(self, system: str | None, tools: Sequence[Tool]) -> str | None:
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
