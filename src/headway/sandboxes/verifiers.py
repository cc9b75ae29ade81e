"""Adapters between our sandboxes and the runtimes of the `verifiers` package: each can stand in for the other."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, cast

from verifiers.v1.errors import SandboxError as RuntimeFailure
from verifiers.v1.runtimes.base import BaseRuntimeInfo, ProgramResult, Runtime, RuntimeProcess

from headway.sandboxes.backend import Backend
from headway.sandboxes.output import Captured
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import WORK, Command, Limit, Limits, Process, Sandbox, SandboxError, Snapshot


class HeadwayRuntimeInfo(BaseRuntimeInfo):  # type: ignore[misc]  # the package brings no types
    """Settings of a `HeadwayRuntime`, and what verifiers records of it."""

    type: Literal["headway"] = "headway"


class HeadwayRuntime(Runtime):  # type: ignore[misc]  # the package brings no types
    """A sandbox of ours with the interface of verifiers' runtimes."""

    def __init__(self, backend: Backend, recipe: Recipe | None = None, limits: Limits | None = None) -> None:
        super().__init__()
        self.config = self.info = HeadwayRuntimeInfo()
        self._backend, self._recipe, self._limits = backend, recipe, limits
        self.sandbox: Sandbox | None = None

    @property
    def _box(self) -> Sandbox:
        if self.sandbox is None:
            raise RuntimeFailure("the runtime was not started")
        return self.sandbox

    async def start(self) -> None:
        self.sandbox = await self._backend.create(self._recipe, self._limits)
        self.info.id = self.sandbox.name

    async def teardown(self) -> None:
        if self.sandbox is not None:
            await self.sandbox.stop()

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        done = await self._box.run(argv, env=self.process_env(env))
        return ProgramResult(done.exit_code, done.stdout, done.stderr)

    async def open_process(self, argv: list[str], env: dict[str, str]) -> RuntimeProcess:
        return _TheirProcess(await self._box.open_process(argv, env=self.process_env(env)))

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        await self._box.background(argv, env=self.process_env(env), log=log)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        try:
            if max_bytes is None:
                return await self._box.read(path)
            return await self._box.read_start(path, max_bytes)
        except SandboxError as error:
            raise RuntimeFailure(str(error)) from error

    async def write(self, path: str, data: bytes) -> None:
        try:
            await self._box.write(path, data)
        except SandboxError as error:
            raise RuntimeFailure(str(error)) from error

    async def expose(self, port: int) -> str:
        return await self._box.expose(port)


class _TheirProcess(RuntimeProcess):  # type: ignore[misc]
    """A process of ours as verifiers' live process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.stdout, self.stderr = _chunks(process.stdout), _chunks(process.stderr)

    async def write(self, data: bytes) -> None:
        await self._process.write(data)

    async def wait(self) -> int:
        return await self._process.wait()

    async def poll(self) -> int | None:
        return self._process.poll()

    async def terminate(self) -> None:
        await self._process.kill(15)

    async def kill(self) -> None:
        await self._process.kill(9)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while chunk := await reader.read(1 << 16):
        yield chunk


class RuntimeSandbox(Sandbox):
    """A runtime of verifiers that was started, as a sandbox. Only time and output are bounded by us.

    Its work folder is the runtime's; `forward` needs a runtime on this machine.
    """

    def __init__(self, runtime: Any, limits: Limits | None = None) -> None:
        self.name, self.limits = str(runtime.name), limits or Limits()
        self._runtime = runtime

    def resolve(self, path: str) -> str:
        """Runtimes have no fixed work folder: relative paths are theirs to resolve."""
        resolved = super().resolve(path)
        return "." if resolved == WORK else resolved.removeprefix(f"{WORK}/")

    async def execute(self, command: Command, out: Captured, err: Captured) -> tuple[int, Limit | None]:
        # Runtimes take no stdin and no folder: a file and a shell stand for them.
        if command.stdin:
            await self._runtime.write(".headway-stdin", command.stdin)
        source = ".headway-stdin" if command.stdin else "/dev/null"
        script = 'exec < "$1"; cd "$2" || exit 126; shift 2; exec "$@"'
        try:
            async with asyncio.timeout(command.seconds):
                argv = ["sh", "-c", script, "sh", source, self.resolve(command.cwd), *command.argv]
                done = await self._runtime.run(argv, dict(command.env))
        except TimeoutError:
            return 137, "time"
        out.feed(done.stdout.encode())
        err.feed(done.stderr.encode())
        return int(done.exit_code), None

    async def read(self, path: str, max_bytes: int = 64 << 20) -> bytes:
        try:
            return cast(bytes, await self._runtime.read(self.resolve(path), max_bytes))
        except (OSError, RuntimeFailure) as error:
            raise SandboxError(str(error)) from error

    async def write(self, path: str, data: bytes) -> None:
        try:
            await self._runtime.write(self.resolve(path), data)
        except (OSError, RuntimeFailure) as error:
            raise SandboxError(str(error)) from error

    async def open_process(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> Process:
        raise SandboxError("live processes of verifiers' runtimes are not carried over; use background")

    async def background(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, log: str, cwd: str | None = None
    ) -> Process:
        await self._runtime.run_background(list(argv), dict(env or {}), self.resolve(log))
        return _Unwatched()

    async def snapshot(self) -> Snapshot:
        raise SandboxError("verifiers' runtimes can't be snapshot: run what follows in the same one")

    async def expose(self, port: int) -> str:
        return str(await self._runtime.expose(port))

    async def forward(self, port: int) -> int:
        if not self._runtime.is_local:
            raise SandboxError(f"a {self._runtime.type} runtime runs elsewhere and can't reach a port of this machine")
        return port

    async def fork(self) -> Sandbox:
        raise SandboxError("verifiers' runtimes can't be forked: start another one")

    async def stop(self) -> None:
        await self._runtime.stop()


class _Unwatched(Process):
    """A background process of a runtime, which gives no handle to it."""

    async def write(self, data: bytes) -> None:
        raise SandboxError("this process has no stdin")

    async def wait(self) -> int:
        raise SandboxError("the runtime gives no handle to its background processes")

    def poll(self) -> int | None:
        return None

    async def kill(self, signal: int = 9) -> None:
        raise SandboxError("the runtime ends its background processes when it stops")
