"""The `process` back end: a folder and plain processes. It isolates NOTHING, and must be asked for by name."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from headway.sandboxes.backend import Backend
from headway.sandboxes.local.sweep import state_folder
from headway.sandboxes.output import PIPE_GRACE, Captured
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import WORK, Command, Limit, Limits, Process, Sandbox, Snapshot, shell_code
from headway.sandboxes.variables import clean_variables


class Processes(Backend):
    """Runs commands as the user, in a folder of their own. Of the limits, time and output hold."""

    name = "process"
    isolates = False

    def __init__(self) -> None:
        self._state = state_folder()
        self._boxes: list[ProcessSandbox] = []

    @classmethod
    def check(cls) -> None:
        return None

    async def create(
        self, recipe: Recipe | None = None, limits: Limits | None = None, snapshot: Snapshot | None = None
    ) -> "ProcessSandbox":
        recipe = recipe or Recipe()
        box = ProcessSandbox(self, recipe, limits or Limits(), Path(tempfile.mkdtemp(dir=self._state)))
        self._boxes.append(box)
        if snapshot is not None:
            await box.restore(snapshot)
            return box
        await recipe.fill(box)
        return box

    async def close(self) -> None:
        for box in self._boxes:
            await box.stop()
        await asyncio.to_thread(shutil.rmtree, self._state, ignore_errors=True)


class ProcessSandbox(Sandbox):
    """A folder that stands for the work folder: paths below /workspace are taken to be below it."""

    def __init__(self, backend: Processes, recipe: Recipe, limits: Limits, folder: Path) -> None:
        self.name, self.limits, self.folder = folder.name, limits, folder
        self._backend, self._recipe = backend, recipe
        self._groups: set[int] = set()

    def resolve(self, path: str) -> str:
        resolved = super().resolve(path)
        inside = resolved == WORK or resolved.startswith(WORK + "/")
        return os.path.normpath(f"{self.folder}/{resolved[len(WORK) :]}") if inside else resolved

    async def _spawn(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, **pipes: int
    ) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=clean_variables({"HOME": str(self.folder), **env}),
            cwd=self.resolve(cwd),
            start_new_session=True,
            **pipes,  # type: ignore[arg-type]
        )
        self._groups.add(process.pid)
        return process

    async def execute(self, command: Command, out: Captured, err: Captured) -> tuple[int, Limit | None]:
        given = out.pipe(), err.pipe()
        try:
            source = asyncio.subprocess.PIPE if command.stdin else asyncio.subprocess.DEVNULL
            process = await self._spawn(
                command.argv, command.env, command.cwd, stdin=source, stdout=given[0], stderr=given[1]
            )
        except OSError as error:
            out.close()
            err.close()
            err.feed(f"cannot run {command.argv[0]}: {error.strerror}\n".encode())
            return (127 if isinstance(error, FileNotFoundError) else 126), None
        finally:
            for descriptor in given:
                os.close(descriptor)
        out.on_flood = err.on_flood = lambda: _kill_group(process.pid)
        hit: Limit | None = None
        try:
            async with asyncio.timeout(command.seconds):
                if process.stdin is not None:
                    with contextlib.suppress(ConnectionError):
                        process.stdin.write(command.stdin)
                        await process.stdin.drain()
                    process.stdin.close()
                code = await process.wait()
        except TimeoutError:
            hit = "time"
            _kill_group(process.pid)
            code = await process.wait()
        except BaseException:
            _kill_group(process.pid)
            out.close()
            err.close()
            raise
        await out.finished(PIPE_GRACE)
        await err.finished(PIPE_GRACE)
        return shell_code(code), hit

    async def open_process(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> "PlainProcess":
        pipe = asyncio.subprocess.PIPE
        return PlainProcess(await self._spawn(argv, env or {}, cwd or WORK, stdin=pipe, stdout=pipe, stderr=pipe))

    async def expose(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    async def forward(self, port: int) -> int:
        return port

    async def fork(self) -> "ProcessSandbox":
        return await self._backend.create(self._recipe, self.limits, await self.snapshot())

    async def stop(self) -> None:
        for group in self._groups:
            _kill_group(group)
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)


class PlainProcess(Process):
    """A live process of this machine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None and process.stderr is not None and process.stdin is not None
        self._process, self._stdin = process, process.stdin
        self.stdout, self.stderr = process.stdout, process.stderr

    async def write(self, data: bytes) -> None:
        self._stdin.write(data)
        await self._stdin.drain()

    async def wait(self) -> int:
        return shell_code(await self._process.wait())

    def poll(self) -> int | None:
        code = self._process.returncode
        return None if code is None else shell_code(code)

    async def kill(self, signal: int = 9) -> None:
        _kill_group(self._process.pid, signal)


def _kill_group(group: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
