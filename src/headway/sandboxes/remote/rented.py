"""Sandboxes of services that rent them out: all verbs, by the three that every service has.

A service runs a shell command, takes a file and gives one. The command is wrapped, so that its outputs come back
bounded and byte for byte, with its exit code, whatever the service makes of them.
"""

import asyncio
import base64
import json
import logging
import os
import posixpath
import shlex
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from aiohttp import ClientError, ClientSession, ClientTimeout

from headway.sandboxes.backend import SnapshotBackend
from headway.sandboxes.output import FLOOD, Captured
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import (
    HOME,
    WORK,
    Command,
    Limit,
    Limits,
    Process,
    Sandbox,
    SandboxError,
    SandboxGoneError,
    SandboxUnavailableError,
    Snapshot,
)

logger = logging.getLogger(__name__)

IDLE_MINUTES = 15
"""A sandbox whose worker was killed ends after this time."""
_FOLDER = "/tmp/.headway"
_LONG_SCRIPT = 100_000
"""Longer ones are sent as a file: the kernel bounds one word of a command to 128 KiB."""
_GRACE_SECONDS = 60.0
_WAIT_SECONDS = 0.5
_WRAPPER = """
d={folder}/{number}; mkdir -p $d; mkfifo $d/o $d/e
head -c {most_out} < $d/o > $d/out & h1=$!
head -c {most_err} < $d/e > $d/err & h2=$!
began=$(date +%s)
( cd {cwd} || exit 126; exec timeout -s KILL {seconds} env {command} ) < {stdin} > $d/o 2> $d/e
code=$?; took=$(( $(date +%s) - began ))
for _ in 1 2 3 4 5; do kill -0 $h1 2> /dev/null || kill -0 $h2 2> /dev/null || break; sleep 0.05; done
kill $h1 $h2 2> /dev/null
echo $code $took
show() {{
  total=$(wc -c < $1); echo $total
  if [ $total -le $2 ]; then base64 < $1; echo .; echo .
  else head -c $(($2 / 2)) $1 | base64; echo .; tail -c $(($2 - $2 / 2)) $1 | base64; echo .; fi
}}
show $d/out {keep_out}; show $d/err {keep_err}; rm -rf $d
"""
_SETUP = f"for d in {WORK} {HOME}; do mkdir -p $d 2> /dev/null || sudo -n install -d -m 777 $d || exit 1; done"
SomeRented = TypeVar("SomeRented", bound="RentedSandbox")


class RentedBackend(SnapshotBackend):
    """Rents sandboxes by HTTP. Of the limits, time and output are ours; the others are what the service grants."""

    variable: ClassVar[str]
    """The environment variable with the key to the service."""

    def __init__(self, image: str) -> None:
        super().__init__()
        self.check()
        self.image = image
        self._http: ClientSession | None = None
        self._boxes: set[RentedSandbox] = set()

    @classmethod
    def check(cls) -> None:
        if not os.environ.get(cls.variable):
            raise SandboxUnavailableError(
                f'sandboxes of kind "{cls.name}" need a key in {cls.variable}, which workers get by '
                f'workers = {{ pass_env = ["{cls.variable}"] }}'
            )

    @property
    def key(self) -> str:
        return os.environ[self.variable]

    @property
    def http(self) -> ClientSession:
        if self._http is None:
            self._http = ClientSession()
        return self._http

    async def close(self) -> None:
        self._prepared.cancel()
        await asyncio.gather(*(box.stop() for box in list(self._boxes)))
        if self._http is not None:
            await self._http.close()

    async def _start(self, recipe: Recipe, limits: Limits) -> Sandbox:
        if recipe.readable:
            raise SandboxError(f'a sandbox of kind "{self.name}" runs elsewhere and can\'t see {recipe.readable[0]}')
        box = await self.rent(limits)
        self._boxes.add(box)
        box.on_stop = lambda: self._boxes.discard(box)
        box.again = lambda end: self.create(recipe, limits, end)
        try:
            await box.shell(_SETUP, _GRACE_SECONDS)
        except BaseException:
            await box.stop()
            raise
        return box

    @abstractmethod
    async def rent(self, limits: Limits) -> "RentedSandbox":
        """Ask the service for a sandbox, and wait until it runs."""

    async def call(self, method: str, url: str, *, seconds: float = _GRACE_SECONDS, **request: Any) -> bytes:
        """Send a request; returns the body of the answer. Raises SandboxError for anything but success."""
        try:
            timeout = ClientTimeout(total=seconds + _GRACE_SECONDS)
            async with self.http.request(method, url, timeout=timeout, **request) as answer:
                body = await answer.read()
        except (OSError, ClientError, TimeoutError) as error:
            raise SandboxGoneError(f"{self.name} does not answer ({error or type(error).__name__})") from None
        if answer.status >= 300:
            said = body[:300].decode(errors="replace")
            kind = SandboxGoneError if answer.status == 410 else SandboxError
            raise kind(f"{self.name} answered {method} {answer.url.path} with {answer.status}: {said}")
        return body

    async def ask(self, method: str, url: str, **request: Any) -> dict[str, Any]:
        """Send a request; returns the JSON object of the answer."""
        found: dict[str, Any] = json.loads(await self.call(method, url, **request) or b"{}")
        return found


class RentedSandbox(Sandbox):
    """A sandbox of a service, by its shell and its files."""

    def __init__(self, name: str, limits: Limits) -> None:
        self.name, self.limits = name, limits
        self.on_stop: Callable[[], None] = lambda: None
        self.again: Callable[[Snapshot], Any]
        self._stopped = False

    @abstractmethod
    async def shell(self, script: str, seconds: float) -> str:
        """Run a script of sh; returns its stdout. Raises SandboxError where it fails."""

    @abstractmethod
    async def put(self, path: str, data: bytes) -> None:
        """Write a file in a folder that is there."""

    @abstractmethod
    async def get(self, path: str) -> bytes:
        """Read a file. Raises SandboxError where there is none."""

    @abstractmethod
    async def give_back(self) -> None:
        """End the sandbox."""

    async def execute(self, command: Command, out: Captured, err: Captured) -> tuple[int, Limit | None]:
        if any("\0" in word for word in (*command.argv, *command.env.values(), command.cwd)):
            raise ValueError("a command, its folder and its variables can't contain NUL")
        number, source = uuid.uuid4().hex, "/dev/null"
        if command.stdin:
            source = f"{_FOLDER}-stdin-{number}"
            await self.put(source, command.stdin)
        variables = [f"{name}={value}" for name, value in command.env.items()]
        script = _WRAPPER.format(
            folder=_FOLDER,
            number=number,
            most_out=FLOOD * out.limit + 1,
            most_err=FLOOD * err.limit + 1,
            keep_out=out.limit,
            keep_err=err.limit,
            cwd=shlex.quote(self.resolve(command.cwd)),
            seconds=f"{command.seconds:.3f}",
            command=shlex.join([*variables, *command.argv]),
            stdin=source,
        )
        if command.stdin:
            script += f"rm -f {source}\n"
        if len(script) > _LONG_SCRIPT:
            await self.put(f"{_FOLDER}-script-{number}", script.encode())
            script = f"sh {_FOLDER}-script-{number}; rm -f {_FOLDER}-script-{number}"
        code, took = _unpack(await self.shell(script, command.seconds), out, err)
        if max(out.left_out, err.left_out) >= (FLOOD - 1) * out.limit:
            return 137, "output"
        return code, "time" if code == 137 and took >= int(command.seconds) else None

    async def read_start(self, path: str, count: int) -> bytes:
        try:
            return (await self.get(self.resolve(path)))[:count]
        except SandboxError as error:
            raise SandboxError(f"read {path}: {error}") from None

    async def write(self, path: str, data: bytes) -> None:
        path = self.resolve(path)
        try:
            await self.shell(f"mkdir -p -- {shlex.quote(posixpath.dirname(path))}", _GRACE_SECONDS)
            await self.put(path, data)
        except SandboxError as error:
            raise SandboxError(f"write {path}: {error}") from None

    async def snapshot(self) -> Snapshot:
        file = f"{_FOLDER}-snapshot-{uuid.uuid4().hex}"
        await self._must("snapshot", ["tar", "-C", WORK, "-cf", file, "."])
        packed = await self.get(file)
        await self.shell(f"rm -f {file}", _GRACE_SECONDS)
        return Snapshot(packed)

    async def background(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, log: str, cwd: str | None = None
    ) -> Process:
        code = f"{_FOLDER}-code-{uuid.uuid4().hex}"
        words = ["env", *(f"{name}={value}" for name, value in (env or {}).items()), *argv]
        inner = f"cd {shlex.quote(self.resolve(cwd or WORK))} && {{ {shlex.join(words)}; }}; echo $? > {code}"
        target = shlex.quote(self.resolve(log))
        script = f"setsid sh -c {shlex.quote(inner)} > {target} 2>&1 < /dev/null & echo $!"
        return RentedProcess(self, int((await self.shell(script, _GRACE_SECONDS)).split()[-1]), code)

    async def open_process(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Process:
        raise SandboxError("rented sandboxes carry no live pipes; use background, with a file as its log")

    async def forward(self, port: int) -> int:
        raise SandboxError("a rented sandbox runs elsewhere and can't reach a port of this machine")

    async def fork(self) -> Sandbox:
        forked: Sandbox = await self.again(await self.snapshot())
        return forked

    async def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self.on_stop()
            try:
                await self.give_back()
            except Exception as error:  # it ended by itself, or will: services bound the lives of sandboxes
                logger.warning("sandbox %s could not be given back (%s); its service ends it later", self.name, error)


class RentedProcess(Process):
    """A background process; `code` is the file that gets its exit code."""

    def __init__(self, box: RentedSandbox, pid: int, code: str) -> None:
        self._box, self._pid, self._file = box, pid, code
        self._code: int | None = None
        self.stdout, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        self.stdout.feed_eof()
        self.stderr.feed_eof()

    async def write(self, data: bytes) -> None:
        raise SandboxError("this process has no stdin")

    async def wait(self) -> int:
        # Whether it lives is asked first: one that ends in between has written its code by the time it is looked for.
        script = f"kill -0 {self._pid} 2> /dev/null; gone=$?; "
        script += f"if test -s {self._file}; then cat {self._file}; elif test $gone != 0; then echo 137; fi"
        while self._code is None:
            if said := (await self._box.shell(script, _GRACE_SECONDS)).split():
                self._code = int(said[0])
            else:
                await asyncio.sleep(_WAIT_SECONDS)
        return self._code

    def poll(self) -> int | None:
        """Return the exit code once `wait` has seen it: a service is not asked in between."""
        return self._code

    async def kill(self, signal: int = 9) -> None:
        await self._box.shell(f"kill -{signal} -{self._pid} 2> /dev/null; true", _GRACE_SECONDS)


def _unpack(text: str, out: Captured, err: Captured) -> tuple[int, int]:
    """Read what the wrapper printed; returns the exit code and the seconds that the command took."""
    lines = iter(text.splitlines())

    def section() -> bytes:
        found: list[str] = []
        for line in lines:
            if line == ".":
                return base64.b64decode("".join(found))
            found.append(line)
        raise SandboxError("the sandbox's answer was cut off")

    try:
        code, took = map(int, next(lines).split())
        for captured in (out, err):
            total = int(next(lines))
            captured.unpack(section(), section(), total)
    except (StopIteration, ValueError):
        raise SandboxError(f"the sandbox could not run the command: {text[-300:]}") from None
    return code, took
