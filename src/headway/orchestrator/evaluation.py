"""Evaluation: rounds of held-out tasks, run beside training within the same budget of episodes."""

import asyncio
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from headway.base.files import write_atomic
from headway.config.orchestrator import EvalSettings
from headway.core.episodes import Episode, EpisodeRequest, Task
from headway.core.protocol import SamplingParams
from headway.orchestrator.dispatch.dispatcher import EngineRouter, Launch, random_id
from headway.orchestrator.groups.sources import EpisodePool
from headway.orchestrator.scores import summarize, task_record

RETRIES = 2


@dataclass(slots=True)
class EvalEnv:
    """An environment to evaluate on: `samples` episodes of every task."""

    name: str
    pool: EpisodePool
    tasks: Sequence[Task]
    samples: int
    sampling: SamplingParams
    timeout: float
    capacity: int = 2**31


@dataclass(slots=True)
class Round:
    """One evaluation of all environments, for the policy after `step`. `results[env][task]` are finished episodes."""

    step: int
    envs: Sequence[EvalEnv]
    waiting: deque[tuple[EvalEnv, int, int, int]]
    results: dict[str, list[list[Episode]]]
    unfinished: int

    def summary(self) -> dict[str, float]:
        return {
            f"eval/{env}/{name}": value
            for env, tasks in self.results.items()
            for name, value in summarize([samples for samples in tasks if samples]).items()
        }


@dataclass(slots=True)
class EvaluationWork:
    """Offers the dispatcher the episodes of the oldest unfinished round; `on_round` gets each whole round."""

    envs: Sequence[EvalEnv]
    router: EngineRouter
    on_round: Callable[[Round], None]
    on_episode: Callable[[Episode], None] = lambda episode: None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    new_id: Callable[[], str] = random_id
    policy: str = "policy"
    api: Literal["tokens", "chat"] = "tokens"
    rounds: deque[Round] = field(default_factory=deque)
    _in_flight: dict[str, int] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        return not self.rounds

    def begin(self, step: int) -> None:
        """Queue a round. Tasks are interleaved, so that environments progress together."""
        if not self.envs:
            return
        episodes = [
            (env, task, sample, 0)
            for task in range(max(len(env.tasks) for env in self.envs))
            for env in self.envs
            if task < len(env.tasks)
            for sample in range(env.samples)
        ]
        results: dict[str, list[list[Episode]]] = {env.name: [[] for _ in env.tasks] for env in self.envs}
        self.rounds.append(Round(step, self.envs, deque(episodes), results, len(episodes)))

    def take(self) -> Launch | None:
        engines = self.router.choose("")
        if not engines or not self.rounds:
            return None
        for round_ in self.rounds:
            for _ in range(len(round_.waiting)):
                env, task, sample, attempt = round_.waiting.popleft()
                if self._in_flight.get(env.name, 0) < env.capacity:
                    return self._launch(round_, env, task, sample, attempt)
                round_.waiting.append((env, task, sample, attempt))
        return None

    def _launch(self, round_: Round, env: EvalEnv, task: int, sample: int, attempt: int) -> Launch:
        group = f"eval-{round_.step}-{env.name}-{task}"
        request = EpisodeRequest(
            episode_id=self.new_id(),
            group_id=group,
            task=env.tasks[task],
            engines=self.router.choose(group),
            policy=self.policy,
            version=self.router.version,
            sampling=env.sampling,
            timeout=env.timeout,
            evaluation=True,
            api=self.api,
        )
        self._in_flight[env.name] = self._in_flight.get(env.name, 0) + 1

        def on_finished(episode: Episode) -> None:
            self._in_flight[env.name] -= 1
            if episode.error is not None and attempt < RETRIES:
                round_.waiting.append((env, task, sample, attempt + 1))
                return
            round_.results[env.name][task].append(episode)
            round_.unfinished -= 1
            self.on_episode(episode)
            if not round_.unfinished:
                self.rounds.remove(round_)
                self.on_round(round_)
                self.changed.set()

        return Launch(env.pool, request, env.name, on_finished)


def evaluation_due(version: int, evaluated: int, settings: EvalSettings, max_steps: int) -> bool:
    """Tell whether `version` starts a new interval since the last evaluation. The last version has its own rule."""
    if settings.interval is None or not evaluated < version < max_steps:
        return False
    return version // settings.interval > max(evaluated, 0) // settings.interval


def write_round(round_: Round, folder: Path) -> list[Path]:
    """Write one JSON line per task, in one file per environment. Return the files."""
    written = []
    for env in round_.envs:
        lines = [
            msgspec.json.encode(task_record(task, samples))
            for task, samples in zip(env.tasks, round_.results[env.name], strict=True)
        ]
        path = folder / f"step_{round_.step:06d}_{re.sub(r'[^A-Za-z0-9_.-]+', '_', env.name)}.jsonl"
        write_atomic(path, b"\n".join(lines) + b"\n")
        written.append(path)
    return written
