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
from typing import Any

import pytest

from headway.base.errors import UsageError
from headway.base.processes import free_port
from headway.core.episodes import Task
from headway.core.messages import Message, ToolCall
from headway.envs.base import EpisodeFailure, State, reward
from headway.envs.mcp import boxed
from headway.envs.mcp.environment import McpToolUse
from headway.envs.mcp.server import McpServer
from headway.envs.sandboxed import Sandboxes
from headway.envs.testing import play
from headway.sandboxes.kinds import available_kinds
from headway.sandboxes.recipe import Recipe

pytest.importorskip("mcp", reason="needs the extra mcp")
NOTES = Path(__file__).with_name("mcp_notes.py")
STDIO = McpServer(command=[sys.executable, str(NOTES)], start_timeout=300.0, timeout=2.0)
PATIENT: Any = {"start_timeout": 300.0, "timeout": 300.0}


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
    def __init__(self, server: McpServer, sandboxes: Sandboxes | None = None) -> None:
        self._server, self.sandboxes = server, sandboxes
        self.told: list[str] = []

    def tasks(self) -> list[Task]:
        return [Task("0", {"text": "a walrus"})]

    def prompt(self, task: Task) -> str:
        return "Write a note, and read it."

    def server(self, task: Task) -> McpServer:
        return self._server

    @reward
    def kept(self, task: Task, state: State) -> float:
        self.told = [m.content for m in state.messages if m.role == "tool"]
        return float(task.data["text"] in self.told)


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


needs_bubblewrap = pytest.mark.skipif(bool(available_kinds()["bubblewrap"]), reason="needs bubblewrap")


def boxed_notes() -> Notes:
    recipe = Recipe(files={"notes.py": NOTES.read_bytes()}, readable=(Path(sys.prefix), Path(sys.base_prefix)))
    return Notes(McpServer(command=[sys.executable, "notes.py"], recipe=recipe, **PATIENT), Sandboxes("notes"))


@needs_bubblewrap
def test_a_server_in_a_sandbox_serves_its_tools_cannot_read_files_outside_and_floods_nobody(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setattr(boxed, "MAX_MESSAGE", 100_000)
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    looks = [call("file", {"path": path}) for path in (str(secret), "notes.py")]
    asked = [*looks, call("variable", {"name": "SOME_TOKEN"}), *SOLUTION[:2], call("long", {"characters": 10**6})]

    def told(environment: Notes) -> list[str]:
        (trace,) = play(environment, 0, [*asked, Message("assistant", "done")])
        assert trace.reward == 1.0
        assert environment.sandboxes is None or trace.metrics["sandbox_starts"] == 1
        return environment.told

    # The same server outside reads it, so what holds it back is the sandbox.
    assert told(Notes(McpServer(command=STDIO.command, **PATIENT)))[0] == "a secret"
    outside, inside, variable, *_, flood = told(boxed_notes())
    assert outside.startswith("error: ") and "No such file" in outside
    assert inside.startswith('"""A small MCP server')
    assert variable == "not set"
    assert flood.startswith("error: ") and "closed" in flood


@needs_bubblewrap
def test_only_programs_run_in_sandboxes_and_one_that_does_not_start_fails_the_episode():
    with pytest.raises(UsageError, match="can't run in a sandbox"):
        play(Notes(McpServer(url="http://127.0.0.1:1/mcp"), Sandboxes("notes")), 0, "x")
    with pytest.raises(EpisodeFailure, match=r"could not be reached|did not answer"):
        play(Notes(McpServer(command=["/no/such/server"], start_timeout=20.0), Sandboxes("notes")), 0, "x")
