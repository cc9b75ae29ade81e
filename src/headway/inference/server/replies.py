"""A reply with tools on its way out: text as it comes, calls piece by piece as OpenAI's clients put them together."""

import re
from typing import Any, Literal

from headway.core.openai.answers import new_id
from headway.rendering.replies import parse_reply

_THINK, _THINK_END = "<think>", "</think>"
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"arguments"\s*:\s*(?=\{)')

Delta = dict[str, Any]
State = Literal["start", "reasoning", "text", "call", "arguments", "closing"]


class ReplyStream:
    """Turns a reply's text into deltas. What `rendering.replies.parse_reply` makes of the whole, they add up to.

    `thinking`: the prompt has opened the reasoning already. Without `calls` there are no tools: tags of calls are text.

    Held back is only what may still become something else: the beginning of a tag, line ends before one, and a
    call until its name is known. A call that does not begin as calls do is sent when it is whole, or as text.
    """

    def __init__(self, *, thinking: bool = False, calls: bool = True) -> None:
        self.calls = 0
        self._state: State = "reasoning" if thinking else "start"
        self._call = _CALL if calls else None
        self._held = ""
        self._trim = thinking
        """Line ends that come next belong to the tag before them."""
        self._depth = 0
        self._quoted = self._escaped = False

    @property
    def calling(self) -> bool:
        """True where the reply ended with its calls whole."""
        return self.calls > 0 and self._state not in ("call", "arguments")

    def feed(self, text: str, *, last: bool = False) -> Delta:
        """The delta that more text makes, {} where there is nothing to show yet. `last` releases what was held."""
        delta: Delta = {}
        self._held += text
        if self._trim:
            self._drop_line_ends()
        while self._advance(delta, last):
            pass
        return delta

    def _advance(self, delta: Delta, last: bool) -> bool:
        """Go on to the next state; False where the text held does not lead there."""
        step = getattr(self, f"_in_{self._state}")
        before = self._state
        step(delta, last)
        return self._state != before

    def _in_start(self, delta: Delta, last: bool) -> None:
        begun = self._held.lstrip("\n")
        if begun.startswith(_THINK):
            self._held, self._state = begun.removeprefix(_THINK), "reasoning"
            self._drop_line_ends()
        elif last or (begun and not _THINK.startswith(begun)):
            self._state = "text"

    def _in_reasoning(self, delta: Delta, last: bool) -> None:
        before, found, after = self._held.partition(_THINK_END)
        if found:
            _add(delta, "reasoning_content", before.rstrip("\n"))
            self._held, self._state = after, "text"
            self._drop_line_ends()
        else:
            self._show(delta, "reasoning_content", _THINK_END, last)

    def _in_text(self, delta: Delta, last: bool) -> None:
        if self._call is None:
            _add(delta, "content", self._held)
            self._held = ""
            return
        before, found, after = self._held.partition(self._call)
        if found:
            _add(delta, "content", before.rstrip("\n"))
            self._held, self._state = after, "call"
        elif self.calls and not self._held.strip("\n"):
            self._held = ""
        else:
            self._show(delta, "content", _CALL, last)

    def _in_call(self, delta: Delta, last: bool) -> None:
        if head := _HEAD.match(self._held):
            self._begin_call(delta, head[1])
            self._held = self._held[head.end() :]
            self._depth, self._quoted, self._escaped = 0, False, False
            self._state = "arguments"
            return
        body, found, after = self._held.partition(_CALL_END)
        if not found:
            if last:
                _add(delta, "content", _CALL + self._held)
                self._held = ""
            return
        whole = parse_reply(_CALL + body + _CALL_END)
        for call in whole.tool_calls:
            self._begin_call(delta, call.name)
            self._add_arguments(delta, call.arguments)
        _add(delta, "content", whole.content)
        self._held, self._state = after, "text"

    def _in_arguments(self, delta: Delta, last: bool) -> None:
        end = self._end_of_object()
        self._add_arguments(delta, self._held[:end])
        self._held = self._held[end:]
        if self._depth == 0 and end:
            self._state = "closing"

    def _in_closing(self, delta: Delta, last: bool) -> None:
        _, found, after = self._held.partition(_CALL_END)
        if found:
            self._held, self._state = after, "text"

    def _drop_line_ends(self) -> None:
        self._held = self._held.lstrip("\n")
        self._trim = not self._held

    def _show(self, delta: Delta, kind: str, tag: str, last: bool) -> None:
        """All but what may be the beginning of `tag`, and line ends before that."""
        end = len(self._held)
        if last:
            end = len(self._held.rstrip("\n")) if self.calls else end
        else:
            sizes = range(min(len(tag) - 1, end), 0, -1)
            end -= next((size for size in sizes if self._held.endswith(tag[:size])), 0)
            end = len(self._held[:end].rstrip("\n"))
        _add(delta, kind, self._held[:end])
        self._held = "" if last else self._held[end:]

    def _begin_call(self, delta: Delta, name: str) -> None:
        function = {"name": name, "arguments": ""}
        call = {"index": self.calls, "id": new_id("call"), "type": "function", "function": function}
        delta.setdefault("tool_calls", []).append(call)
        self.calls += 1

    def _add_arguments(self, delta: Delta, text: str) -> None:
        if not text:
            return
        calls = delta.setdefault("tool_calls", [])
        if not calls or calls[-1]["index"] != self.calls - 1:
            calls.append({"index": self.calls - 1, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += text

    def _end_of_object(self) -> int:
        """The end of the object of arguments in the held text; all of it while it has not come."""
        for place, character in enumerate(self._held):
            if self._quoted:
                self._quoted = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return len(self._held)


def whole_message(delta: Delta) -> Delta:
    """The message that one delta of a whole reply makes; its content is null where it only calls tools."""
    content = delta.get("content") or (None if "tool_calls" in delta else "")
    return {"role": "assistant", **delta, "content": content}


def _add(delta: Delta, kind: str, text: str) -> None:
    if text:
        delta[kind] = delta.get(kind, "") + text
