"""The policy that is trained: conversations become tokens, which engines continue."""

import asyncio

import msgspec

from headway.core.messages import Message, Messages, as_messages, count_images
from headway.core.shapes import ReplyShape
from headway.envs.engines.sampler import EngineSampler
from headway.envs.policy import EpisodeFailure, Policy, ShapeRefused, Tools
from headway.envs.tools import describe
from headway.envs.tree import TraceTree
from headway.rendering.base import NO_CALL_TOKEN, Renderer, call_token, reasoning_end


class EnginePolicy(Policy):
    """One agent of an episode whose replies are sampled by engines."""

    def __init__(self, renderer: Renderer, sampler: EngineSampler, agent: str = "policy") -> None:
        self.tree = TraceTree(renderer, agent)
        super().__init__(self.tree.trace)
        self._renderer = renderer
        self._sampler = sampler

    async def chat(
        self,
        messages: Messages,
        tools: Tools = (),
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        shape: ReplyShape | None = None,
    ) -> Message:
        said = as_messages(messages)
        try:
            if count_images(said) and (read := getattr(self._renderer, "read_images", None)) is not None:
                await asyncio.to_thread(read, said)
            prompt = self.tree.prompt(said, [describe(tool) for tool in tools])
        except ValueError as error:
            if not count_images(said):
                raise
            raise EpisodeFailure("environment", str(error)) from error
        if shape is not None and shape.response_format is not None:
            shape = self._fitted_format(shape, bool(tools))
        reply = await self._sampler.sample(prompt, max_tokens, temperature, shape)
        return self.tree.record(prompt, reply)

    def _fitted_format(self, shape: ReplyShape, tools: bool) -> ReplyShape:
        """`shape` with the tokens that its format begins after, or gives way to. Raises ShapeRefused."""
        opens_call = call_token(self._renderer) if tools else None
        if tools and opens_call is None:
            raise ShapeRefused(NO_CALL_TOKEN, "response_format")
        return msgspec.structs.replace(shape, free_until=reasoning_end(self._renderer), call_token=opens_call)

    def count_tokens(self, messages: Messages, tools: Tools = ()) -> int:
        return len(self.tree.prompt(as_messages(messages), [describe(tool) for tool in tools]).token_ids)

    @property
    def images(self) -> dict[str, bytes]:
        return self.tree.images

    def another(self, name: str) -> Policy:
        return EnginePolicy(self._renderer, self._sampler, name)
