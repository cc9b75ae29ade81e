"""The first process of a sandbox where no C compiler is there to build keeper.c: the same protocol, slower to start.

Runs by itself inside a sandbox, where this package is not: it imports the standard library only.
"""

import array
import ctypes
import os
import resource
import select
import signal
import socket
import sys


class Keeper:
    """See keeper.c for the requests and replies."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._commands: dict[int, int] = {}

    def serve(self) -> None:
        wake, waker = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker)
        self._reply("S", 0, os.getpid())
        while True:
            ready, _, _ = select.select([self._control.fileno(), wake], [], [])
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            if self._control.fileno() in ready:
                self._request()

    def _reply(self, operation: str, number: int, value: int, given: tuple[int, ...] = ()) -> None:
        try:
            full = operation == "E" and os.statvfs("/workspace").f_bavail == 0
        except OSError:
            full = False
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))] if given else []
        self._control.sendmsg([array.array("i", [ord(operation), number, value, full])], extra)

    def _request(self) -> None:
        data, extra, _, _ = self._control.recvmsg(12, socket.CMSG_SPACE(16))
        if not data:
            os._exit(0)
        operation, number, value = array.array("i", data)
        given = list(array.array("i", extra[0][2])) if extra else []
        if operation == ord("R"):
            self._start(number, given)
        elif operation == ord("K"):
            for pid, command in self._commands.items():
                if command == number:
                    os.killpg(pid, value)
        else:
            self._open_port(chr(operation), number, value)
        for descriptor in given:
            os.close(descriptor)

    def _start(self, number: int, given: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            os.write(given[3], f"cannot start a process: {error}\n".encode())
            self._reply("E", number, 126 << 8)
            return
        if pid == 0:
            _become(given)
        self._commands[pid] = number

    def _open_port(self, operation: str, number: int, port: int) -> None:
        opened = socket.socket()
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if operation == "L":
                opened.bind(("127.0.0.1", port))
                opened.listen(128)
            else:
                opened.connect(("127.0.0.1", port))
        except OSError as error:
            self._reply(operation, number, error.errno or 1)
        else:
            self._reply(operation, number, 0, (opened.fileno(),))
        opened.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._commands:
                self._reply("E", self._commands.pop(pid), status)


def _become(given: list[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    size = os.fstat(given[0]).st_size
    cwd, count, *words = os.pread(given[0], size, 0).split(b"\0")[:-1]
    os.setsid()
    for target, source in enumerate(given[1:4]):
        os.dup2(source, target)
    os.closerange(3, 4096)
    argv, variables = words[: int(count)], words[int(count) :]
    try:
        os.chdir(cwd)
        os.execvpe(argv[0], argv, dict(variable.split(b"=", 1) for variable in variables))
    except FileNotFoundError as error:
        os.write(2, f"cannot run {argv[0].decode(errors='replace')}: {error.strerror}\n".encode())
        os._exit(127)
    except OSError as error:
        os.write(2, f"cannot run {argv[0].decode(errors='replace')}: {error.strerror}\n".encode())
        os._exit(126)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: unreadable for the commands it starts
    if len(sys.argv) > 2:
        resource.setrlimit(resource.RLIMIT_NPROC, (int(sys.argv[2]), int(sys.argv[2])))
    Keeper(socket.socket(fileno=int(sys.argv[1]))).serve()
