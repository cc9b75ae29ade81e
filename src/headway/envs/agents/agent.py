"""Any agent program as an environment: it is pointed at an endpoint of the episode's own and run unchanged."""

import inspect
import io
import json
import math
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.base.errors import UsageError
from headway.base.imports import load_object
from headway.core.episodes import Task
from headway.envs.agents.program import run_program
from headway.envs.agents.proxy import Proxy
from headway.envs.base import Environment, EpisodeFailure, Policy
from headway.envs.sandboxed import Sandboxes
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import WORK, Snapshot
from headway.sandboxes.variables import clean_variables


@dataclass(frozen=True)
class AgentRun:
    """The outcome of one run of the program. `scratch` is its folder, deleted once the reward is given."""

    exit_code: int
    stdout: str
    stderr: str
    calls: int
    scratch: Path
    """What the program wrote to HEADWAY_SCRATCH; from a sandbox only plain files and folders, no links."""


RewardFunction = Callable[[dict[str, Any], AgentRun], Any]
"""A function of the task's data and the run: returns a number, or named numbers that are added up. May be async."""


class AgentProgram(Environment):
    """Runs `command` once per episode, with OPENAI_BASE_URL and ANTHROPIC_BASE_URL set, and scores what came of it.

    In the command, `{name}` stands for a field of the task and `{python}` for this interpreter. The program also
    finds the task as JSON in HEADWAY_TASK and an empty folder in HEADWAY_SCRATCH. `tasks` is a list of objects
    or a JSONL file; `reward` the import path, `module:function` or `file.py:function`, of a `RewardFunction`.

    With `sandbox` ("auto", or a kind of sandbox) the program runs in one: it sees the system, this interpreter, `cwd`
    and the paths in `readable`, all read-only, and reaches its model and nothing else. `limits` are the sandbox's.
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
        sandbox: str | None = None,
        limits: Mapping[str, Any] | None = None,
        readable: Sequence[str] = (),
        sandboxes: int = 32,
    ) -> None:
        if isinstance(command, str) or not command:
            raise UsageError('agent: command must be a list of words, such as ["{python}", "agent.py", "{question}"]')
        self._command, self._timeout, self._cwd, self._env = list(command), timeout, cwd, dict(env or {})
        self._tasks = _read_tasks(tasks)
        self._reward: RewardFunction = load_object(reward, "agent: reward")
        self._proxy = Proxy()
        self._sandboxes = Sandboxes("agent", sandbox, limits, sandboxes) if sandbox else None
        seen = [sys.prefix, sys.base_prefix, *([cwd] if cwd else []), *readable]
        self._recipe = Recipe(readable=tuple(dict.fromkeys(Path(path).absolute() for path in seen)))

    def tasks(self) -> Sequence[Task]:
        return self._tasks

    async def close(self) -> None:
        await self._proxy.close()
        if self._sandboxes is not None:
            await self._sandboxes.close()

    async def run(self, task: Task, policy: Policy) -> None:
        with tempfile.TemporaryDirectory(prefix="headway-agent-", ignore_cleanup_errors=True) as scratch:
            async with self._proxy.endpoint(lambda _session: policy) as endpoint:
                variables = {
                    **self._env,
                    **endpoint.variables(),
                    "HEADWAY_TASK": json.dumps(task.data),
                }
                if self._sandboxes is not None:
                    async with self._sandboxes.episode(policy):
                        code, out, err = await self._run_inside(self._words(task), variables, endpoint.port, scratch)
                else:
                    environment = clean_variables({"HEADWAY_SCRATCH": scratch, **variables})
                    code, out, err = await run_program(self._words(task), environment, self._cwd, self._timeout)
                endpoint.check()
            if not endpoint.calls:
                raise EpisodeFailure("environment", f"the agent never asked its model (exit code {code}): {err[-400:]}")
            await self._score(task, AgentRun(code, out, err, endpoint.calls, Path(scratch)), policy)

    async def _run_inside(
        self, words: list[str], variables: dict[str, str], port: int, scratch: str
    ) -> tuple[int, str, str]:
        """Run the program in a sandbox that reaches one port, and bring what it wrote to its scratch folder."""
        assert self._sandboxes is not None
        limits = self._sandboxes.limits
        async with self._sandboxes.pool.sandbox(self._recipe, limits, owner="agent") as box:
            await box.forward(port)
            inside = {"HEADWAY_SCRATCH": box.resolve(WORK), **variables}
            done = await box.run(words, env=inside, seconds=self._timeout, cwd=self._cwd)
            if done.limit == "time":
                raise EpisodeFailure("timeout", f"the agent took longer than {self._timeout:g} s")
            _unpack(await box.snapshot(), scratch)
        return done.exit_code, done.stdout, done.stderr

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


def _unpack(snapshot: Snapshot, folder: str) -> None:
    """Write the plain files and folders of a snapshot that lie in the folder; links could lead out of it."""
    with tarfile.open(fileobj=io.BytesIO(snapshot.archive)) as archive:
        for entry in archive:
            path = Path(os.path.normpath(Path(folder, entry.name)))
            if not path.is_relative_to(folder):
                continue
            content = archive.extractfile(entry) if entry.isfile() else None
            if content is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
                path.chmod(entry.mode & 0o755 | 0o600)
            elif entry.isdir():
                path.mkdir(parents=True, exist_ok=True)


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
