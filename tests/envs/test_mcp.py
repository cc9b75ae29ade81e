"""Tools of real MCP servers over stdio and HTTP, called by scripted policies."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.core.episodes import Task
from headway.core.errors import UsageError
from headway.core.messages import Message, ToolCall
from headway.core.processes import free_port
from headway.envs.base import EpisodeFailure, State, reward
from headway.envs.mcp.environment import McpToolUse
from headway.envs.mcp.server import McpServer
from headway.envs.testing import play

pytest.importorskip("mcp", reason="needs the extra mcp")
NOTES = Path(__file__).with_name("mcp_notes.py")
STDIO = McpServer(command=[sys.executable, str(NOTES)], timeout=2.0)


@pytest.fixture(scope="module")
def http() -> Iterator[McpServer]:
    port = free_port()
    process = subprocess.Popen([sys.executable, str(NOTES), str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.05)
        yield McpServer(url=f"http://127.0.0.1:{port}/mcp")
    finally:
        process.kill()
        process.wait()


class Notes(McpToolUse):
    def __init__(self, server: McpServer) -> None:
        self._server = server

    def tasks(self) -> list[Task]:
        return [Task("0", {"text": "a walrus"})]

    def prompt(self, task: Task) -> str:
        return "Write a note, and read it."

    def server(self, task: Task) -> McpServer:
        return self._server

    @reward
    def kept(self, task: Task, state: State) -> float:
        return float(any(m.role == "tool" and m.content == task.data["text"] for m in state.messages))


def call(name: str, arguments: object) -> Message:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return Message("assistant", tool_calls=(ToolCall("call", name, text),))


SOLUTION = [call("write", {"name": "x", "text": "a walrus"}), call("read", {"name": "x"}), Message("assistant", "done")]


def test_a_scripted_policy_solves_a_task_over_stdio():
    (trace,) = play(Notes(STDIO), 0, SOLUTION)
    assert trace.reward == 1.0


def test_a_scripted_policy_solves_a_task_over_http(http):
    (trace,) = play(Notes(http), 0, SOLUTION)
    assert trace.reward == 1.0


def test_tools_are_described_errors_are_told_and_the_server_ends_with_the_episode(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret")

    async def main() -> list[str]:
        async with STDIO.connect() as tools:
            described = {tool.name: tool for tool in tools.tools}
            assert described["write"].description == "Write a note."
            assert described["write"].parameters["required"] == ["name", "text"]
            calls = [
                ("pid", "{}"),
                ("variable", '{"name": "SOME_TOKEN"}'),
                ("read", '{"name": "nowhere"}'),
                ("read", "{}"),
                ("read", "not JSON"),
                ("read", "[]"),
                ("nothing", "{}"),
                ("wait", '{"seconds": 60}'),
            ]
            return [(await tools.call(ToolCall("1", name, text))).content for name, text in calls]

    pid, variable, *errors = asyncio.run(main())
    assert variable == "not set"
    assert all(error.startswith("error: ") for error in errors), errors
    assert "there is no note nowhere" in errors[0]
    assert "there is no tool 'nothing'" in errors[4]
    assert errors[5] == "error: wait took longer than 2 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_servers_that_are_not_there_fail_the_episode_and_settings_are_checked():
    with pytest.raises(EpisodeFailure, match=r"could not be reached|did not answer"):
        play(Notes(McpServer(command=["/no/such/server"], start_timeout=20.0)), 0, "x")
    with pytest.raises(EpisodeFailure, match=r"could not be reached|did not answer"):
        play(Notes(McpServer(url=f"http://127.0.0.1:{free_port()}/mcp", start_timeout=20.0)), 0, "x")
    with pytest.raises(UsageError, match="either a command"):
        McpServer()
    with pytest.raises(UsageError, match="begins with http"):
        McpServer(url="file:///etc")
