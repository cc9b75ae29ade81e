"""The worker's side of a keeper: commands started, killed and awaited in one sandbox, and ports carried through."""

import array
import asyncio
import os
import socket
from collections.abc import Mapping, Sequence

from headway.sandboxes.keepers.base import packed_command
from headway.sandboxes.sandbox import SandboxGoneError

_Reply = tuple[int, int, list[int]]


class KeeperConnection:
    """Requests to a sandbox's first process over a socket. See keeper.c for the protocol."""

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(False)
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._numbers = 0
        self._waiting: dict[int, asyncio.Future[_Reply]] = {0: self._loop.create_future()}
        self._loop.add_reader(control.fileno(), self._readable)
        self.closed = False

    @property
    def ready(self) -> "asyncio.Future[_Reply]":
        """Done once the keeper runs; raises SandboxGoneError where it never will."""
        return self._waiting[0]

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, given: Sequence[int]
    ) -> tuple[int, "asyncio.Future[_Reply]"]:
        """Start a command with the descriptors `given` as stdin, stdout, stderr; returns its number and its end."""
        packed = packed_command(argv, env, cwd)
        payload = os.memfd_create("command")
        try:
            os.write(payload, packed)
            return self._request("R", 0, [payload, *given])
        finally:
            os.close(payload)

    def kill(self, number: int, signal: int = 9) -> None:
        """Send a signal to the group of a command that may have ended."""
        if number in self._waiting:
            self._send("K", number, signal, [])

    async def open_port(self, operation: str, port: int) -> socket.socket:
        """Return a socket that listens ("L") on or is connected ("C") to a loopback port of the sandbox."""
        _, future = self._request(operation, port, [])
        value, _, given = await future
        if value:
            raise OSError(value, f"port {port} in the sandbox: {os.strerror(value)}")
        return socket.socket(fileno=given[0])

    def close(self) -> None:
        """Hang up: the keeper ends, and with it everything in the sandbox."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(SandboxGoneError("the sandbox has ended"))
                    future.exception()  # nobody may be waiting
            self._waiting.clear()

    def _request(self, operation: str, value: int, given: Sequence[int]) -> tuple[int, "asyncio.Future[_Reply]"]:
        self._numbers += 1
        self._send(operation, self._numbers, value, given)
        future = self._waiting[self._numbers] = self._loop.create_future()
        return self._numbers, future

    def _send(self, operation: str, number: int, value: int, given: Sequence[int]) -> None:
        if self.closed:
            raise SandboxGoneError("the sandbox has ended")
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))] if given else []
        try:
            self._control.sendmsg([array.array("i", [ord(operation), number, value])], extra)
        except OSError as error:
            self.close()
            raise SandboxGoneError(f"the sandbox has ended ({error})") from error

    def _readable(self) -> None:
        try:
            data, extra, _, _ = self._control.recvmsg(16, socket.CMSG_SPACE(16))
        except BlockingIOError:
            return
        except OSError:
            data, extra = b"", []
        if len(data) != 16:
            self.close()
            return
        _, number, value, full = array.array("i", data)
        given = list(array.array("i", extra[0][2])) if extra else []
        future = self._waiting.get(number) if number == 0 else self._waiting.pop(number, None)
        if future is not None and not future.done():
            future.set_result((value, full, given))
        else:
            for descriptor in given:
                os.close(descriptor)
