"""Run one episode: environment, policy, rewards, time limit; whatever happens becomes an `Episode`."""

import asyncio
import time
import traceback
from collections.abc import Sequence

from headway.config.context import ContextRule
from headway.core.episodes import Episode, EpisodeError, EpisodeRequest, ErrorKind, Trace
from headway.envs.base import Environment
from headway.envs.chat_endpoint import ChatClient, ChatPolicy
from headway.envs.context.policy import ManagedPolicy
from headway.envs.engines.engines import Engines
from headway.envs.engines.policy import EnginePolicy
from headway.envs.engines.sampler import EngineSampler
from headway.envs.policy import EpisodeFailure, Policy
from headway.envs.reply_log import ReplyLog
from headway.envs.rewards import Reward, score
from headway.rendering.base import Renderer

_DETAIL_LIMIT = 8000
_MESSAGE_LIMIT = 1000


class EpisodeRunner:
    """Runs episodes of one environment, any number at once."""

    def __init__(
        self,
        environment: Environment,
        name: str,
        renderer: Renderer,
        engines: Engines,
        context: ContextRule | None = None,
        turn_timeout: float | None = None,
    ) -> None:
        """`context` replaces the environment's own rule; one reply may take `turn_timeout` seconds."""
        self._turn_timeout = turn_timeout
        self._environment = environment
        self._context = context or environment.context_rule
        self._rewards: Sequence[Reward] = environment.rewards()
        self._name = name
        self._renderer = renderer
        self._engines = engines

    async def run(self, request: EpisodeRequest, log: ReplyLog | None = None, spent: float = 0.0) -> Episode:
        """Never raises: errors, timeouts and cancellation are in the episode, beside what was said by then.

        An episode that another worker has begun, `spent` seconds ago, goes on after the replies in `log`.
        """
        log = log or ReplyLog()
        sampler, policy = self._policy(request, log)
        episode = blank_episode(request, self._name)
        episode.started_at = time.time() - spent
        clock = time.perf_counter() - spent
        episode.error = await self._attempt(request, policy, log, episode.timings, spent)
        episode.traces = _traces(policy)
        episode.images = {digest: data for agent in policy.agents() for digest, data in agent.images.items()}
        total = time.perf_counter() - clock
        rewarding = episode.timings.setdefault("reward", 0.0)
        episode.timings |= {
            "total": total,
            "engine": sampler.seconds,
            "environment": max(0.0, total - sampler.seconds - rewarding),
        }
        return episode

    def _policy(self, request: EpisodeRequest, log: ReplyLog) -> tuple[EngineSampler | ChatClient, Policy]:
        if request.api == "chat":
            client = ChatClient(request, self._engines.session(), self._turn_timeout)
            return client, self._managed(ChatPolicy(client))
        sampler = EngineSampler(request, self._engines, self._renderer.stop_token_ids, self._turn_timeout, log)
        return sampler, self._managed(EnginePolicy(self._renderer, sampler))

    def _managed(self, policy: Policy) -> Policy:
        return policy if self._context is None else ManagedPolicy(policy, self._context)

    async def _attempt(
        self, request: EpisodeRequest, policy: Policy, log: ReplyLog, timings: dict[str, float], spent: float
    ) -> EpisodeError | None:
        limit = asyncio.timeout(request.timeout - spent)
        try:
            async with limit:
                state = await self._environment.run(request.task, policy)
                log.check_ended()
                clock = time.perf_counter()
                try:
                    await score(self._rewards, request.task, _traces(policy), state)
                finally:
                    timings["reward"] = time.perf_counter() - clock
        except asyncio.CancelledError:
            return EpisodeError("cancelled", "the episode was cancelled")
        except MemoryError as error:
            return EpisodeError("worker", "the worker ran out of memory; see workers.memory_gb", as_error(error).detail)
        except TimeoutError as error:
            if limit.expired():
                return EpisodeError("timeout", f"the episode took longer than {request.timeout:g} s")
            return as_error(error)
        except (Exception, SystemExit) as error:
            return as_error(error)
        return None


def blank_episode(request: EpisodeRequest, env: str, error: EpisodeError | None = None) -> Episode:
    return Episode(
        id=request.episode_id,
        group_id=request.group_id,
        env=env,
        task=request.task,
        policy=request.policy,
        version=request.version,
        error=error,
        evaluation=request.evaluation,
    )


def _traces(policy: Policy) -> list[Trace]:
    return [agent.trace for agent in policy.agents()] or [policy.trace]


def as_error(failure: BaseException, kind: ErrorKind = "environment") -> EpisodeError:
    """Turn `failure` into data, with the end of its traceback. An `EpisodeFailure` knows its own kind."""
    if isinstance(failure, EpisodeFailure):
        kind, message = failure.kind, failure.message
    else:
        message = f"{type(failure).__name__}: {failure}"
    detail = "".join(traceback.format_exception(failure))
    return EpisodeError(kind, message[:_MESSAGE_LIMIT], detail[-_DETAIL_LIMIT:])
