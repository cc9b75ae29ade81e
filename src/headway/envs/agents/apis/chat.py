"""OpenAI's Chat Completions API, which needs no translation."""

from collections.abc import Iterator
from typing import Any, Self

import msgspec

from headway.core.messages import Message
from headway.core.openai.answers import Completion
from headway.core.openai.requests import ChatRequest, Json, RequestError, decode, read_messages
from headway.envs.agents.apis.call import Call, Kept, Recall


class AgentChatRequest(ChatRequest, kw_only=True):
    """A request whose messages are not read yet: most of them were in the call before."""

    messages: list[msgspec.Raw]  # type: ignore[assignment]


class ChatCall(Call):
    """POST /v1/chat/completions"""

    @classmethod
    def read(cls, content: bytes, kept: Kept) -> Self:
        asked = decode(content, AgentChatRequest)
        if asked.n not in (None, 1):
            raise RequestError("n must be 1: an episode has one reply per call", "n")
        if asked.logprobs:
            raise RequestError("logprobs are not sent to agents: leave it out", "logprobs")
        return cls(asked, kept)

    def conversation(self, recall: Recall) -> list[Message]:
        raws: list[Any] = self.chat.messages
        if not raws:
            raise RequestError("there are no messages", "messages")
        seen, said = self.kept.latest
        if raws[: len(seen)] != seen:
            seen, said = [], []
        new = [self._message(bytes(raw), recall) for raw in raws[len(seen) :]]
        self.kept.latest = raws, [*said, *new]
        return self.kept.latest[1]

    def _message(self, raw: bytes, recall: Recall) -> Message:
        known = self.kept.messages.get(raw)
        if known is None:
            known = self.kept.messages[raw] = recall(_read(raw))
        return known

    def body(self, reply: Completion) -> Json:
        return reply.body()

    def events(self, reply: Completion) -> Iterator[bytes]:
        return reply.events(with_usage=self.chat.wants_usage)


def _read(raw: bytes) -> Message:
    try:
        (message,) = read_messages([msgspec.json.decode(raw, type=Json)])
    except msgspec.ValidationError as error:
        raise RequestError(f"a message is an object: {error}", "messages") from None
    return message
