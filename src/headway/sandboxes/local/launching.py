"""The worker's side of the launcher: one process per worker, started with its first sandbox."""

import array
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.sandboxes.sandbox import SandboxGoneError


class Launcher:
    """Starts processes in namespaces, and says when they are gone with everything that was theirs."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("launcher.py")), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", os.defpath)},
            )
        ours.setblocking(False)
        self._control = ours
        self._gone: dict[int, asyncio.Future[str | None]] = {}
        self._numbers = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(ours.fileno(), self._readable)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def launch(
        self, request: Mapping[str, Any], given: Sequence[int]
    ) -> tuple[int, "asyncio.Future[str | None]"]:
        """Start one; returns its number, and a future that is done when nothing of it is left.

        Its result is the limit that the groups saw, if they saw one.
        """
        self._numbers += 1
        number = self._numbers
        future = self._gone[number] = self._loop.create_future()
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))]
        data = json.dumps({**request, "number": number}).encode()
        try:
            while True:
                with contextlib.suppress(BlockingIOError):  # the launcher is behind: its queue is short
                    self._control.sendmsg([data], extra)
                    return number, future
                await asyncio.sleep(0.005)
        except OSError as error:
            self._lost()
            raise SandboxGoneError(
                f"the launcher of sandboxes has ended ({error}); the worker must be restarted"
            ) from error

    def kill(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._control.send(json.dumps({"kill": number}).encode())

    async def close(self) -> None:
        """End the launcher and all sandboxes it started."""
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        await asyncio.to_thread(self._process.wait)
        self._lost()

    def _readable(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._control.fileno())
            self._lost()
            return
        message = json.loads(data)
        future = self._gone.pop(message["gone"], None)
        if future is not None and not future.done():
            future.set_result(message["hit"])

    def _lost(self) -> None:
        for future in self._gone.values():
            if not future.done():
                future.set_result(None)
        self._gone.clear()
