"""Any installed taskset of `verifiers`: its env server in a process of its own, its calls answered by our policy.

The server is pointed at the episode's endpoint of the proxy, so that tokens, logprobs and versions are recorded as
for every other environment: one renderer, nothing tokenized twice. Tasks, tools, stop conditions and rewards are
the package's.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.envs.adapters import require
from headway.envs.agents.proxy import Proxy
from headway.envs.base import Environment, EpisodeFailure, Policy

if TYPE_CHECKING:
    from headway.envs.adapters.verifiers_bridge import Client, Outcome

VERSION = "0.4.0"
BRIDGE = "headway.envs.adapters.verifiers_bridge"


class Verifiers(Environment):
    """`taskset` is the id under which the package finds it; `config` its settings.

    `harness` is the program that talks to the model; by default a chat loop with the taskset's tools. `roles`
    are the seats of environments with several agents. `settings` are merged into the package's own.
    """

    def __init__(
        self,
        *,
        taskset: str,
        config: dict[str, Any] | None = None,
        harness: str | None = None,
        roles: Sequence[str] = ("agent",),
        max_turns: int | None = None,
        num_tasks: int | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        require("verifiers", "verifiers", "verifiers", exactly=VERSION)
        self._bridge: Any = require(BRIDGE, "verifiers", "verifiers")
        seat = {
            "harness": {"id": harness or self._bridge.HARNESS},
            "runtime": {"type": "subprocess"},
            "max_turns": max_turns,
        }
        self._config = {
            "taskset": {"id": taskset, **(config or {})},
            **dict.fromkeys(roles, seat),
            **(settings or {}),
        }
        try:
            self._rows = self._bridge.load_tasks(self._config)[:num_tasks]
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise UsageError(f'verifiers: taskset "{taskset}" cannot be loaded: {error}') from error
        self._proxy = Proxy()
        self._server: asyncio.subprocess.Process | None = None
        self._client: Client | None = None
        self._starting = asyncio.Lock()

    def modules(self) -> Sequence[str]:
        return [*super().modules(), self._bridge.taskset_module(self._config)]

    def tasks(self) -> Sequence[Task]:
        return [Task(str(row.get("name") or index), row) for index, row in enumerate(self._rows)]

    async def open(self) -> None:
        await self._connect()

    async def close(self) -> None:
        await self._disconnect()
        await self._proxy.close()

    async def run(self, task: Task, policy: Policy) -> None:
        client, server = await self._connect()
        sessions: dict[str, Policy] = {}

        def speaker(session: str) -> Policy:
            if session not in sessions:
                sessions[session] = policy.agent("session", len(sessions)) if sessions else policy
            return sessions[session]

        async with self._proxy.endpoint(speaker) as endpoint:
            running = asyncio.create_task(client.run(task.data, endpoint.base_url))
            died = asyncio.create_task(server.wait())
            try:
                await asyncio.wait([running, died], return_when=asyncio.FIRST_COMPLETED)
                if endpoint.failure is not None:
                    raise endpoint.failure
                if not running.done():
                    raise EpisodeFailure("environment", f"the verifiers server ended (exit code {server.returncode})")
                outcomes = running.result()
            finally:
                running.cancel()
                died.cancel()
        _settle(outcomes, sessions)

    async def _connect(self) -> "tuple[Client, asyncio.subprocess.Process]":
        """The server, started at the first call and again after it died."""
        async with self._starting:
            if self._server is None or self._client is None or self._server.returncode is not None:
                await self._disconnect()
                self._server, address = await _start_server(self._config)
                self._client = self._bridge.Client(address)
            return self._client, self._server

    async def _disconnect(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._server is not None:
            await _stop_server(self._server)
            self._server = None


def _settle(outcomes: "list[Outcome]", sessions: dict[str, Policy]) -> None:
    """Hand out rewards. Agents that are not to be trained leave no trace."""
    for outcome in outcomes:
        agent = sessions.get(outcome.session)
        if agent is None:
            continue
        if not outcome.trainable:
            agent.trace.nodes.clear()
            continue
        if len(outcomes) > 1:
            agent.trace.agent = outcome.agent
        for name, (score, weight) in outcome.rewards.items():
            agent.reward(name, score, weight)
        for name, value in outcome.metrics.items():
            agent.metric(name, value)


async def _start_server(config: dict[str, Any]) -> tuple[asyncio.subprocess.Process, str]:
    pipe = asyncio.subprocess.PIPE
    server = await asyncio.create_subprocess_exec(sys.executable, "-m", BRIDGE, stdin=pipe, stdout=pipe)
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(config).encode() + b"\n")
    async for line in server.stdout:  # a taskset may print before the server does
        word, _, address = line.decode(errors="replace").strip().partition(" ")
        if word == "address":
            return server, address
    code = await server.wait()
    raise EpisodeFailure("environment", f"the verifiers server did not start (exit code {code}); its log says why")


async def _stop_server(server: asyncio.subprocess.Process) -> None:
    """It ends by itself when its stdin closes; after ten seconds it is made to."""
    if server.stdin is not None:
        server.stdin.close()
    try:
        async with asyncio.timeout(10):
            await server.wait()
    except TimeoutError:
        server.kill()
        await server.wait()
