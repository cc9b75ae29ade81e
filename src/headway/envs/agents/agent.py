"""Any agent program as an environment: it is pointed at the episode's own OpenAI endpoint and run unchanged."""

import inspect
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.core.episodes import Task
from headway.core.errors import UsageError
from headway.core.imports import load_object
from headway.envs.agents.program import run_program
from headway.envs.agents.proxy import Proxy
from headway.envs.base import Environment, EpisodeFailure, Policy

_SECRETS = ("HEADWAY_TOKEN",)
"""Variables that the program must not inherit."""


@dataclass(frozen=True)
class AgentRun:
    """The outcome of one run of the program. `scratch` is its folder, deleted once the reward is given."""

    exit_code: int
    stdout: str
    stderr: str
    calls: int
    scratch: Path


RewardFunction = Callable[[dict[str, Any], AgentRun], Any]
"""A function of the task's data and the run: returns a number, or named numbers that are added up. May be async."""


class AgentProgram(Environment):
    """Runs `command` once per episode, with OPENAI_BASE_URL and OPENAI_API_KEY set, and scores what came of it.

    In the command, `{name}` stands for a field of the task and `{python}` for this interpreter. The program also
    finds the task as JSON in HEADWAY_TASK and an empty folder in HEADWAY_SCRATCH. `tasks` is a list of objects
    or a JSONL file; `reward` the import path, `module:function` or `file.py:function`, of a `RewardFunction`.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        tasks: str | Sequence[Mapping[str, Any]],
        reward: str,
        timeout: float = 300.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(command, str) or not command:
            raise UsageError('agent: command must be a list of words, such as ["{python}", "agent.py", "{question}"]')
        self._command, self._timeout, self._cwd, self._env = list(command), timeout, cwd, dict(env or {})
        self._tasks = _read_tasks(tasks)
        self._reward: RewardFunction = load_object(reward, "agent: reward")
        self._proxy = Proxy()

    def tasks(self) -> Sequence[Task]:
        return self._tasks

    async def close(self) -> None:
        await self._proxy.close()

    async def run(self, task: Task, policy: Policy) -> None:
        with tempfile.TemporaryDirectory(prefix="headway-agent-", ignore_cleanup_errors=True) as scratch:
            async with self._proxy.endpoint(lambda _session: policy) as endpoint:
                environment = {
                    **{name: value for name, value in os.environ.items() if name not in _SECRETS},
                    **self._env,
                    "OPENAI_BASE_URL": endpoint.base_url,
                    "OPENAI_API_KEY": endpoint.api_key,
                    "HEADWAY_TASK": json.dumps(task.data),
                    "HEADWAY_SCRATCH": scratch,
                }
                code, out, err = await run_program(self._words(task), environment, self._cwd, self._timeout)
                endpoint.check()
            if not endpoint.calls:
                raise EpisodeFailure("environment", f"the agent never asked its model (exit code {code}): {err[-400:]}")
            await self._score(task, AgentRun(code, out, err, endpoint.calls, Path(scratch)), policy)

    def _words(self, task: Task) -> list[str]:
        fields = {"python": sys.executable, **task.data}
        return [re.sub(r"\{(\w+)\}", lambda found: str(fields.get(found[1], found[0])), word) for word in self._command]

    async def _score(self, task: Task, outcome: AgentRun, policy: Policy) -> None:
        policy.metric("exit_code", outcome.exit_code)
        policy.metric("calls", outcome.calls)
        try:
            value = self._reward(dict(task.data), outcome)
            if inspect.isawaitable(value):
                value = await value
            named = value if isinstance(value, Mapping) else {"reward": value}
            numbers = {str(name): float(number) for name, number in named.items()}
        except Exception as error:
            raise EpisodeFailure("reward", f"the agent's reward failed: {type(error).__name__}: {error}") from error
        for name, number in numbers.items():
            if not math.isfinite(number):
                raise EpisodeFailure("reward", f"the agent's reward {name} is {number}; it must be a finite number")
            policy.reward(name, number)


def _read_tasks(tasks: str | Sequence[Mapping[str, Any]]) -> list[Task]:
    if not isinstance(tasks, str):
        rows = [dict(row) for row in tasks]
    else:
        try:
            lines = Path(tasks).read_bytes().splitlines()
            rows = [msgspec.json.decode(line, type=dict[str, Any]) for line in lines if line.strip()]
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(f"agent: tasks {tasks}: {error}; it must be a JSONL file of objects") from error
    return [Task(str(row.get("id", index)), row) for index, row in enumerate(rows)]
