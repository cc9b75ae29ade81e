"""Servers whose address cannot be had: one line that says why and what to do."""

import asyncio
import socket
from pathlib import Path

import pytest
from aiohttp import web

from headway.base.addresses import cannot_listen
from headway.cli import main


async def _listen(host: str, port: int) -> None:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    finally:
        await runner.cleanup()


def test_a_taken_port_is_said_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use") as caught:
        asyncio.run(_listen("127.0.0.1", port := taken.getsockname()[1]))
    said = f"cannot listen at 127.0.0.1:{port}: Address already in use; choose another --port"
    assert str(cannot_listen("127.0.0.1", port, caught.value)) == said


def test_a_name_that_nobody_knows_is_said() -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    said = "cannot listen at nowhere:80: Name or service not known; choose another"
    assert str(cannot_listen("nowhere", 80, unknown, "choose another")) == said


@pytest.mark.parametrize("command", [["dash", "."], ["sandboxes", "--access", "access.json"]])
def test_commands_say_what_to_do_about_a_taken_port(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main.run([*command, "--port", str(taken.getsockname()[1])]) == 1
    error = capsys.readouterr().err
    assert "Address already in use; choose another --port" in error and "Errno" not in error
