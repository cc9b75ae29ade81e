"""A policy that is a person at a terminal: environments can be played by hand."""

import json
import sys
from collections.abc import Callable
from typing import TextIO

from headway.core.episodes import Trace
from headway.core.messages import Message, Tool, ToolCall
from headway.core.shapes import ReplyShape
from headway.envs.policy import EpisodeFailure, MessagePolicy, Policy
from headway.envs.terminal_images import ShowImage, name_image
from headway.envs.transcript import Paint, message_text

CALL = "/call"


class HandPolicy(MessagePolicy):
    """Shows each agent what it has not seen yet and reads its reply, a line each, from `source`.

    `/call NAME {"argument": …}` calls a tool. The end of the input ends the episode as a failure.
    """

    def __init__(
        self,
        source: TextIO,
        show: Callable[[str], None],
        paint: Paint,
        agent: str = "policy",
        show_image: ShowImage = name_image,
    ) -> None:
        super().__init__(Trace(agent))
        self._source, self._show, self._paint, self._show_image = source, show, paint, show_image
        self._seen: list[Message] = []

    async def reply(
        self,
        messages: list[Message],
        tools: list[Tool],
        max_tokens: int | None,
        temperature: float | None,
        shape: ReplyShape | None,
    ) -> Message:
        seen = self._seen
        for message in messages[len(seen) :] if messages[: len(seen)] == seen else messages:
            self._show(message_text(message, self._paint, self._show_image))
        if tools and not seen:
            self._show(self._paint("dim", "tools: " + "; ".join(f"{t.name} — {t.description}" for t in tools)))
            self._show(self._paint("dim", f'to call one: {CALL} {tools[0].name} {{"argument": "value"}}'))
        reply = self._read()
        self._seen = [*messages, reply]
        return reply

    def another(self, name: str) -> Policy:
        return HandPolicy(self._source, self._show, self._paint, name, self._show_image)

    def _read(self) -> Message:
        if self._source.isatty():
            print(self._paint("sampled", f"{self.trace.agent}> "), end="", file=sys.stderr, flush=True)
        line = self._source.readline()
        if not line:
            raise EpisodeFailure("cancelled", "the input ended")
        text = line.rstrip("\n")
        if not text.startswith(CALL + " "):
            return Message("assistant", text)
        _, name, arguments = [*text.split(" ", 2), "{}"][:3]
        try:
            json.loads(arguments)
        except ValueError as error:
            self._show(self._paint("dim", f"not JSON ({error}); sent as it is"))
        return Message("assistant", tool_calls=(ToolCall(f"call_{len(self._seen)}", name, arguments),))
