"""Episodes whose replies come from a function: an engine in the process, or a record that is played again."""

from collections.abc import Callable

from headway.core.episodes import Episode, EpisodeRequest, Node
from headway.envs.base import Environment
from headway.envs.engines import Engines
from headway.envs.episodes import EpisodeRunner
from headway.envs.policy import ContextLimit, EpisodeFailure
from headway.envs.reply_log import LoggedReply, ReplyLog
from headway.envs.tree import Prompt, Reply
from headway.rendering.base import Renderer

Answer = Callable[[Prompt], Reply]
"""Answers a prompt. Raises EpisodeFailure where it can't."""


class Player:
    """Plays episodes of one environment in this process."""

    def __init__(self, environment: Environment, name: str, renderer: Renderer) -> None:
        self.stops = frozenset(renderer.stop_token_ids)
        self.repeats = environment.resumable
        """True where the same replies lead to the same episode, so that it can be played again."""
        self._runner = EpisodeRunner(environment, name, renderer, Engines())

    async def play(self, request: EpisodeRequest, answer: Answer) -> Episode:
        """Play one episode. Failures are in the episode."""
        return await self._runner.run(request, _Answers(answer))

    async def play_again(self, request: EpisodeRequest, claimed: Episode, context: int) -> Episode:
        """Play an episode with the replies that `claimed` has for it. One that asks for more or fewer ends in an error,
        except where the conversation has outgrown `context` tokens."""
        left = [node for trace in claimed.traces for node in trace.nodes if node.sampled]
        left.reverse()

        def answer(prompt: Prompt) -> Reply:
            if len(prompt.token_ids) >= context:
                raise ContextLimit(f"the conversation has {len(prompt.token_ids)} tokens; the context holds {context}")
            if not left:
                raise EpisodeFailure("worker", "the environment asks for more replies than there are")
            return _reply(left.pop())

        episode = await self.play(request, answer)
        if left and episode.error is None:
            return await self.play(request, _refuse)
        return episode


class _Answers(ReplyLog):
    """Answers every prompt at once, where a log would give back what an earlier worker was told."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def replay(self, prompt: Prompt) -> LoggedReply:
        return LoggedReply(b"", self._answer(prompt), 0.0)


def _reply(node: Node) -> Reply:
    assert node.logprobs is not None
    return Reply(node.token_ids, node.logprobs, node.versions, node.finish_reason or "", node.temperature)


def _refuse(prompt: Prompt) -> Reply:
    raise EpisodeFailure("worker", "the environment asks for fewer replies than there are")
