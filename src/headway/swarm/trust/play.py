"""Episodes whose replies come from a function or a record: an engine in the process, or an episode played again."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from headway.base.errors import HeadwayError
from headway.config.orchestrator import EnvSettings
from headway.core.episodes import Episode, EpisodeRequest, Node
from headway.envs.base import Environment
from headway.envs.engines.engines import Engines
from headway.envs.episodes import EpisodeRunner
from headway.envs.reply_log import LoggedReply, Recorded, RecordedReplies, ReplyLog
from headway.envs.tree import Prompt, Reply
from headway.envs.workers.pool import EnvPool
from headway.rendering.base import Renderer

Answer = Callable[[Prompt], Reply]
"""Answers a prompt. Raises EpisodeFailure where it can't."""
ATTEMPTS = 2
"""Workers that may die under one episode before it counts as one that can't be played again."""


class NotJudgedError(HeadwayError):
    """The run can't judge a contribution now, for reasons of its own; the worker may send it again."""


class Replayer(Protocol):
    """Plays episodes of one environment again."""

    repeats: bool
    """True where the same replies lead to the same episode, so that it can be played again."""

    async def play_again(self, request: EpisodeRequest, claimed: Episode, context: int) -> Episode:
        """Play an episode with the replies that `claimed` has for it. One that asks for more or fewer ends in an error,
        except where the conversation has outgrown `context` tokens. Raises NotJudgedError."""
        ...


class Player:
    """Plays episodes of one environment in this process, on its event loop: for environments that take no time."""

    def __init__(self, environment: Environment, name: str, renderer: Renderer) -> None:
        self.stops = frozenset(renderer.stop_token_ids)
        self.repeats = environment.resumable
        self._runner = EpisodeRunner(environment, name, renderer, Engines())

    async def play(self, request: EpisodeRequest, answer: Answer) -> Episode:
        """Play one episode. Failures are in the episode."""
        return await self._runner.run(request, _Answers(answer))

    async def play_again(self, request: EpisodeRequest, claimed: Episode, context: int) -> Episode:
        return await self._runner.run(request, RecordedReplies(recorded_of(claimed, context)))


class PoolPlayer:
    """Plays episodes again in worker processes: an environment that is slow, hangs or crashes holds up nobody else.

    `model` is the folder of the run's model, for its renderer.
    """

    def __init__(self, settings: EnvSettings, model: Path, renderer: str, *, repeats: bool) -> None:
        self.repeats = repeats
        self._pool = EnvPool(settings, model=model, renderer=renderer)
        self._started, self._closed = asyncio.Event(), False

    async def start(self) -> None:
        """Start the workers; episodes wait for them. Raises HeadwayError where the environment can't be started."""
        await self._pool.start()
        self._started.set()

    async def play_again(self, request: EpisodeRequest, claimed: Episode, context: int) -> Episode:
        await self._started.wait()
        recorded = recorded_of(claimed, context)
        for _ in range(ATTEMPTS):
            episode = await self._pool.run(request, recorded)
            if self._closed:
                raise NotJudgedError("the service ends; send it again later")
            # A worker that died may have been killed for reasons that are not the episode's.
            if episode.error is None or episode.error.kind != "worker":
                break
        return episode

    async def close(self) -> None:
        self._closed = True
        await self._pool.close()


class _Answers(ReplyLog):
    """Answers every prompt at once, where a log would give back what an earlier worker was told."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer

    def replay(self, prompt: Prompt) -> LoggedReply:
        return LoggedReply(b"", self._answer(prompt), 0.0)


def recorded_of(episode: Episode, context: int) -> Recorded:
    """Return the replies of an episode, in the order in which they were sampled."""
    nodes = [node for trace in episode.traces for node in trace.nodes if node.sampled]
    return Recorded([_reply(node) for node in nodes], context)


def _reply(node: Node) -> Reply:
    assert node.logprobs is not None
    return Reply(node.token_ids, node.logprobs, node.versions, node.finish_reason or "", node.temperature)
