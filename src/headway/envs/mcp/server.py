"""An MCP server as a source of tools: started or connected to for one episode, and gone with it."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headway.base.errors import UsageError
from headway.base.processes import die_with_parent_command, die_with_parent_environment
from headway.core.messages import Message, Tool, ToolCall
from headway.envs.adapters import require
from headway.envs.mcp.boxed import boxed_streams
from headway.envs.policy import EpisodeFailure
from headway.envs.tools import cut
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import Sandbox

if TYPE_CHECKING:
    from mcp import Client


@dataclass(frozen=True)
class McpServer:
    """A program that speaks MCP on stdin and stdout, or the URL of a server that speaks streamable HTTP.

    A program gets PATH, HOME, and the like, and `env`: nothing else of this process's variables. In a sandbox it finds
    what `recipe` says, and `cwd` is a folder there. `start_timeout` bounds the connection and the list of tools,
    `timeout` one call, both in seconds.
    """

    command: Sequence[str] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    recipe: Recipe = field(default_factory=Recipe)
    start_timeout: float = 60.0
    timeout: float = 30.0
    max_output: int = 8192

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url) or isinstance(self.command, str):
            raise UsageError('an MCP server has either a command, such as ["python", "server.py"], or a url')
        if self.url and not self.url.startswith(("http://", "https://")):
            raise UsageError(f'the url of an MCP server begins with http:// or https:// (got "{self.url}")')

    @asynccontextmanager
    async def connect(self, box: Sandbox | None = None) -> AsyncIterator["McpTools"]:
        """Connect for as long as the block runs; a program runs in `box`, if there is one.

        Raises EpisodeFailure where the server can't be reached.
        """
        if box is not None and self.url:
            raise UsageError(f"{self} can't run in a sandbox: it runs already; give its command instead of its url")
        package = require("mcp", "mcp", "mcp")
        longest = max(self.start_timeout, self.timeout)
        try:
            async with asyncio.timeout(self.start_timeout):
                where = self.url or (self._program(package) if box is None else await self._boxed(box))
                client = package.Client(where, read_timeout_seconds=longest)
                await client.__aenter__()
        except TimeoutError:
            raise EpisodeFailure("environment", f"{self} did not answer within {self.start_timeout:g} s") from None
        except Exception as error:
            raise EpisodeFailure("environment", f"{self} could not be reached: {_reason(error)}") from error
        try:
            yield await McpTools.listed(client, self)
        finally:
            await client.__aexit__(None, None, None)

    async def _boxed(self, box: Sandbox) -> Any:
        words = [str(word) for word in self.command]
        return boxed_streams(await box.open_process(words, env=self.env, cwd=self.cwd))

    def _program(self, package: Any) -> Any:
        command, *arguments = die_with_parent_command([str(word) for word in self.command])
        variables = {**die_with_parent_environment(), **_PYTHON, **self.env}
        return package.stdio_client(
            package.StdioServerParameters(command=command, args=arguments, env=variables, cwd=self.cwd)
        )

    def __str__(self) -> str:
        return f"the MCP server {self.url or ' '.join(self.command)}"


_PYTHON = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
"""Lets the small program that ends with this process find Headway."""


class McpTools:
    """The tools of a connected server, which can be called like those of a `Toolbox`."""

    def __init__(self, client: "Client", server: McpServer, tools: Sequence[Tool]) -> None:
        self._client, self._server = client, server
        self.tools = list(tools)

    @classmethod
    async def listed(cls, client: "Client", server: McpServer) -> "McpTools":
        """List all tools, page by page. Raises EpisodeFailure where that fails or there are none."""
        found: list[Tool] = []
        cursor: str | None = None
        try:
            async with asyncio.timeout(server.start_timeout):
                while not found or cursor:
                    listed = await client.list_tools(cursor=cursor)
                    found += [Tool(t.name, t.description or "", dict(t.input_schema)).check() for t in listed.tools]
                    cursor = listed.next_cursor
                    if not listed.tools and not cursor:
                        break
        except Exception as error:
            raise EpisodeFailure("environment", f"{server}: its tools can't be listed: {_reason(error)}") from error
        if not found:
            raise EpisodeFailure("environment", f"{server} has no tools")
        return cls(client, server, found)

    async def call(self, call: ToolCall) -> Message:
        """Run a call; its result, or what went wrong, is the tool's message."""
        content = cut(await self._result(call), self._server.max_output)
        return Message("tool", content, tool_call_id=call.id, name=call.name)

    async def _result(self, call: ToolCall) -> str:
        names = [tool.name for tool in self.tools]
        if call.name not in names:
            return f"error: there is no tool {call.name!r}; the tools are {', '.join(names)}"
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError as error:
            return f"error: arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: arguments must be a JSON object"
        try:
            async with asyncio.timeout(self._server.timeout):
                result = await self._client.call_tool(call.name, arguments)
        except TimeoutError:
            return f"error: {call.name} took longer than {self._server.timeout:g} s"
        except Exception as error:
            return f"error: {_reason(error)}"
        text = "\n".join(_text(part) for part in result.content)
        return f"error: {text}" if result.is_error else text


def _text(part: Any) -> str:
    """Return the text of a part of a result; other kinds are named, since models read text only."""
    return str(part.text) if part.type == "text" else f"[{part.type}, which can't be shown]"


def _reason(error: BaseException) -> str:
    """Return the message of the first error in a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
