"""A conversation in which the model may call the tools of an MCP server."""

from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from headway.core.episodes import Task
from headway.core.messages import Message
from headway.envs.base import MultiTurn, Policy, State
from headway.envs.mcp.server import McpServer, McpTools
from headway.envs.sandboxed import Sandboxes

_tools: ContextVar[McpTools] = ContextVar("headway_mcp_tools")


class McpToolUse(MultiTurn):
    """Like `ToolUse`, with the tools of `server`, to which each episode has a connection of its own.

    The episode ends with a reply that calls nothing. Calls may change what lies behind the server: set `resumable` to
    True where they can be made again.
    """

    resumable = False
    sandboxes: Sandboxes | None = None
    """Where servers that are programs run, one sandbox for each episode; without it they run as you."""

    @abstractmethod
    def server(self, task: Task) -> McpServer:
        """The server of an episode."""

    async def run(self, task: Task, policy: Policy) -> State:
        async with self._connect(self.server(task), policy) as tools:
            token = _tools.set(tools)
            try:
                return await super().run(task, policy)
            finally:
                _tools.reset(token)

    @asynccontextmanager
    async def _connect(self, server: McpServer, policy: Policy) -> AsyncIterator[McpTools]:
        if self.sandboxes is None:
            async with server.connect() as tools:
                yield tools
            return
        async with (
            self.sandboxes.episode(policy),
            self.sandboxes.pool.sandbox(server.recipe, self.sandboxes.limits, owner="mcp") as box,
            server.connect(box) as tools,
        ):
            yield tools

    async def close(self) -> None:
        if self.sandboxes is not None:
            await self.sandboxes.close()

    async def ask(self, state: State, policy: Policy) -> Message:
        return await policy.chat(state.messages, _tools.get().tools)

    async def respond(self, state: State, reply: Message) -> Any:
        if not reply.tool_calls:
            return None
        return [await _tools.get().call(call) for call in reply.tool_calls]
