"""Agent programs that resolve issues: run unchanged in the task's sandbox, with the policy behind OpenAI's chat API."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from headway.base.errors import UsageError
from headway.envs.agents.proxy import Proxy
from headway.envs.policy import EpisodeFailure, Policy
from headway.envs.swe.runtime import PATH, Runtime
from headway.envs.swe.tasks import SweTask
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import HOME, Sandbox

_PROGRAMS = f"{HOME}/bin"


class AgentCommand:
    """A program, started once per episode in the repository. Of the network it reaches its model only.

    It finds the endpoint in OPENAI_BASE_URL or ANTHROPIC_BASE_URL, and the issue in HEADWAY_ISSUE. Its home folder and
    /tmp are writable, and gone afterwards.
    """

    def __init__(
        self, command: Sequence[str], seconds: float, variables: Mapping[str, str], readable: Sequence[str]
    ) -> None:
        if isinstance(command, str) or not command:
            raise UsageError('swe: agent must be a list of words, such as ["agent/bin/mini", "--task", "{issue}"]')
        self._command, self._seconds, self._variables = list(command), seconds, dict(variables)
        self._readable = tuple(Path(path).absolute() for path in readable)
        self._proxy = Proxy()

    def recipe(self, recipe: Recipe) -> Recipe:
        """Let the sandbox see what the program needs, too."""
        return replace(recipe, readable=tuple(dict.fromkeys((*recipe.readable, *self._readable))))

    async def run(self, box: Sandbox, task: SweTask, runtime: Runtime, policy: Policy) -> int:
        """Run the program to its end; returns how often it asked its model."""
        words = [re.sub(r"\{issue\}", lambda _: task.issue, word) for word in self._command]
        async with self._proxy.endpoint(lambda _session: policy) as endpoint:
            await box.forward(endpoint.port)
            variables = {
                "PATH": f"{await _wrap_python(box, runtime)}:{PATH}",
                "HEADWAY_ISSUE": task.issue,
                **endpoint.variables(),
                **self._variables,
            }
            done = await box.run(words, env=variables, seconds=self._seconds)
            endpoint.check()
        policy.metric("agent_exit_code", done.exit_code)
        policy.metric("agent_calls", endpoint.calls)
        if not endpoint.calls:
            said = (done.stderr or done.stdout)[-600:]
            raise EpisodeFailure("environment", f"the agent never asked its model (exit code {done.exit_code}): {said}")
        return endpoint.calls

    async def close(self) -> None:
        await self._proxy.close()


async def _wrap_python(box: Sandbox, runtime: Runtime) -> str:
    """Write programs called python and pytest that find the repository; returns their folder.

    As a variable, the path would also lead the agent's own interpreter into the repository, which may hold a broken
    copy of what the agent itself imports.
    """
    path, python = runtime.variables(box)["PYTHONPATH"], runtime.python
    scripts = {"python": "", "python3": "", "pytest": " -m pytest"}
    for name, words in scripts.items():
        text = f'#!/bin/sh\nPYTHONPATH={shlex.quote(path)} exec {shlex.quote(python)}{words} "$@"\n'
        await box.write(f"{_PROGRAMS}/{name}", text.encode())
    await box.run(["chmod", "-R", "755", _PROGRAMS])
    return _PROGRAMS
