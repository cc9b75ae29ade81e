"""The sandbox protocol: a box in which commands run, with limits, files of its own and no network."""

import asyncio
import logging
import posixpath
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from headway.base.errors import HeadwayError
from headway.sandboxes.meters import meters
from headway.sandboxes.output import Captured

logger = logging.getLogger(__name__)

Limit = Literal["time", "memory", "processes", "disk", "output"]

WORK = "/workspace"
"""The folder in which commands run, and which a snapshot holds."""
HOME = "/home/agent"
MAX_READ = 64 << 20


class SandboxError(HeadwayError):
    """A sandbox could not do what was asked of it; the message says why."""


class SandboxUnavailableError(SandboxError):
    """This machine can't run the back end; the message says what to install."""


class SandboxGoneError(SandboxError):
    """The sandbox ended while it was in use: stopped, killed, or out of memory."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one sandbox. Bytes, counts and seconds; `cpus` is a share of cores, such as 0.5 or 2."""

    memory: int = 512 << 20
    processes: int = 64
    cpus: float = 1.0
    disk: int = 256 << 20
    """All that is written in the sandbox: work, temporary and home folders together."""
    seconds: float = 60.0
    """One command, unless `run` is told otherwise."""
    output: int = 256 << 10
    """Bytes kept of a command's stdout and of its stderr; one that writes 64 times as much is killed."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise SandboxError(f"sandbox limits: {name} must be a positive number (got {value!r})")


@dataclass(frozen=True)
class Command:
    """One command as back ends get it. `seconds` bounds it; `env` is added to the sandbox's own variables."""

    argv: Sequence[str]
    seconds: float
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    cwd: str = WORK


@dataclass(frozen=True)
class Result:
    """The outcome of one command. A command killed by signal N has exit code 128 + N, as in a shell."""

    exit_code: int
    stdout: str
    stderr: str
    limit: Limit | None = None
    """The limit that the command ran into, if one was seen."""
    left_out: int = 0
    """Bytes of output beyond `Limits.output`, which the texts say at the place."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """The work folder of a sandbox as a tar archive. Outside a sandbox nothing but its plain files is ever unpacked."""

    archive: bytes


class Process(ABC):
    """A live process in a sandbox whose stdin and output cross its wall."""

    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to the process's stdin."""

    @abstractmethod
    async def wait(self) -> int:
        """Return the exit code once the process has ended."""

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""

    @abstractmethod
    async def kill(self, signal: int = 9) -> None:
        """Send a signal to the process and its group."""


class Sandbox(ABC):
    """A box of its own for one episode. Stopped by `stop` or at the end of `async with`; then nothing is left of it.

    The verbs are those of verifiers' `Runtime`, and `snapshot` and `fork`.
    """

    name: str
    limits: Limits

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        seconds: float | None = None,
        cwd: str | None = None,
    ) -> Result:
        """Run a command to its end. `env` is added to a small clean environment; a missing program is exit code 127.

        Processes that it leaves behind live on until `stop`, unless it ran out of time: then its group is killed.
        """
        out, err = Captured(self.limits.output), Captured(self.limits.output)
        clock = asyncio.get_running_loop().time
        began = clock()
        command = Command(list(argv), seconds or self.limits.seconds, dict(env or {}), stdin, cwd or WORK)
        code, hit = await self.execute(command, out, err)
        left_out = out.left_out + err.left_out
        if hit is None and left_out:
            hit = "output"
        gauge = meters()
        gauge.count("commands")
        gauge.count("seconds_run", clock() - began)
        if hit is not None:
            gauge.count(f"limit_{hit}")
        return Result(code, out.text(), err.text(), hit, left_out, clock() - began)

    async def read(self, path: str, max_bytes: int = MAX_READ) -> bytes:
        """Read a file. Raises SandboxError where there is none or it is longer than `max_bytes`."""
        data = await self.read_start(path, max_bytes + 1)
        if len(data) > max_bytes:
            raise SandboxError(f"read {path}: longer than {max_bytes} bytes")
        return data

    async def read_start(self, path: str, count: int) -> bytes:
        """Read the first `count` bytes of a file. Raises SandboxError where there is none."""
        return (
            await self._must(f"read {path}", ["head", "-c", str(count), "--", self.resolve(path)], keep=count)
        ).kept()

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and the folders it needs. Raises SandboxError, for example where the disk is full."""
        path = self.resolve(path)
        script = ["sh", "-c", 'mkdir -p -- "$1" && cat > "$2"', "sh", posixpath.dirname(path), path]
        await self._must(f"write {path}", script, data)

    async def background(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, log: str, cwd: str | None = None
    ) -> Process:
        """Start a process that lives until `stop`; its stdout and stderr go to the file `log` in the sandbox."""
        script = ["sh", "-c", 'log=$1; shift; exec "$@" > "$log" 2>&1 < /dev/null', "sh", self.resolve(log), *argv]
        return await self.open_process(script, env=env, cwd=cwd)

    async def snapshot(self) -> Snapshot:
        """Keep the work folder as it is now."""
        argv = ["tar", "-C", self.resolve(WORK), "-cf", "-", "."]
        packed = await self._must("snapshot", argv, keep=2 * self.limits.disk + (1 << 20))
        if packed.left_out:
            raise SandboxError("snapshot: the work folder is larger than twice the disk limit")
        return Snapshot(packed.kept())

    async def restore(self, snapshot: Snapshot) -> None:
        """Unpack a snapshot over the work folder."""
        argv = ["tar", "-C", self.resolve(WORK), "--no-same-owner", "-xf", "-"]
        await self._must("restore", argv, snapshot.archive)

    async def unpack_folder(self, folder: Path) -> None:
        """Copy a folder of this machine into the work folder. Its links stay links: they lead nowhere outside."""
        packed = await asyncio.to_thread(
            subprocess.run, ["tar", "-C", str(folder), "-cf", "-", "."], capture_output=True
        )
        if packed.returncode:
            raise SandboxError(f"{folder}: {packed.stderr.decode(errors='replace').strip()}")
        await self.restore(Snapshot(packed.stdout))

    def resolve(self, path: str) -> str:
        """Make `path` absolute within the sandbox; relative ones begin in the work folder."""
        return posixpath.normpath(posixpath.join(WORK, path))

    async def _must(self, what: str, argv: list[str], stdin: bytes = b"", keep: int = 4096) -> Captured:
        """Run a command of our own; returns its output, up to `keep` bytes. Raises SandboxError where it fails."""
        out, err = Captured(keep), Captured(4096)
        code, _ = await self.execute(Command(argv, self.limits.seconds, stdin=stdin), out, err)
        if code:
            raise SandboxError(f"{what}: {err.text().strip() or f'exit code {code}'}")
        return out

    @abstractmethod
    async def execute(self, command: Command, out: Captured, err: Captured) -> tuple[int, Limit | None]:
        """Run a command as `run` does, its output into `out` and `err`.

        Returns the exit code and the limit that was seen to be hit. This is what back ends implement.
        """

    @abstractmethod
    async def open_process(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Process:
        """Start a live process, with pipes to it."""

    @abstractmethod
    async def expose(self, port: int) -> str:
        """Make a port that a process in the sandbox listens on reachable; returns its URL on loopback here."""

    @abstractmethod
    async def forward(self, port: int) -> int:
        """Make one port of this machine's loopback reachable from inside, and nothing else.

        Returns the port to use there, on 127.0.0.1.
        """

    @abstractmethod
    async def fork(self) -> "Sandbox":
        """Start another sandbox with the same limits, whose work folder begins as this one's is now."""

    @abstractmethod
    async def stop(self) -> None:
        """End everything that runs in the sandbox and remove all of it. May be called twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Shielded: a cancelled episode must not leave its sandbox behind.
        await asyncio.shield(self.stop())


def shell_code(code: int) -> int:
    """Return an exit code as a shell has it: 128 + N for a process that signal N ended, which Python calls -N."""
    return code if code >= 0 else 128 - code
