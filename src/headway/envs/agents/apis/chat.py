"""OpenAI's Chat Completions API, which needs no translation."""

from collections.abc import Iterator
from typing import Self

from headway.core.openai import ChatRequest, Completion, Json, RequestError, decode
from headway.envs.agents.apis.call import Call, Kept


class ChatCall(Call):
    """POST /v1/chat/completions"""

    @classmethod
    def read(cls, content: bytes, kept: Kept) -> Self:
        asked = decode(content, ChatRequest)
        if asked.n not in (None, 1):
            raise RequestError("n must be 1: an episode has one reply per call", "n")
        if asked.logprobs:
            raise RequestError("logprobs are not sent to agents: leave it out", "logprobs")
        return cls(asked, kept)

    def body(self, reply: Completion) -> Json:
        return reply.body()

    def events(self, reply: Completion) -> Iterator[bytes]:
        return reply.events(with_usage=self.chat.wants_usage)
