"""A program run to its end: bounded in time and output, and gone afterwards with everything it started."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from headway.envs.policy import EpisodeFailure

MAX_OUTPUT = 1 << 20
"""Bytes of stdout and of stderr that are kept; the rest is read and dropped."""


async def run_program(
    words: Sequence[str], environment: Mapping[str, str], cwd: str | None, timeout: float
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr. The program's whole process group is killed at the end, however it comes."""
    async with _captured() as out, _captured() as err:
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                env=dict(environment),
                cwd=cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out.inlet,
                stderr=err.inlet,
                start_new_session=True,
            )
        except OSError as error:
            raise EpisodeFailure("environment", f"the agent could not be started: {error}") from error
        finally:
            out.seal()
            err.seal()
        try:
            async with asyncio.timeout(timeout):
                code = await process.wait()
        except TimeoutError:
            raise EpisodeFailure("timeout", f"the agent took longer than {timeout:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        # A grandchild that left the group may hold the pipes open for ever; what it says is not the agent's.
        await asyncio.wait([out.reading, err.reading], timeout=1.0)
        return code, out.text(), err.text()


@dataclass
class _Captured:
    """The first MAX_OUTPUT bytes of what is written to `inlet`; the rest is read and dropped."""

    inlet: int
    kept: bytearray
    reading: "asyncio.Task[None]"

    def seal(self) -> None:
        """The child has its own copy of the inlet; while ours is open, the end is never seen."""
        if self.inlet >= 0:
            os.close(self.inlet)
            self.inlet = -1

    def text(self) -> str:
        return self.kept.decode(errors="replace")


@contextlib.asynccontextmanager
async def _captured() -> AsyncIterator[_Captured]:
    """A pipe of our own: asyncio's would make waiting for the process wait for everyone who holds it."""
    outlet, inlet = os.pipe()
    reader, kept = asyncio.StreamReader(), bytearray()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(outlet, "rb", buffering=0)
    )

    async def drain() -> None:
        while chunk := await reader.read(1 << 16):
            kept.extend(chunk[: MAX_OUTPUT - len(kept)])

    captured = _Captured(inlet, kept, loop.create_task(drain()))
    try:
        yield captured
    finally:
        captured.seal()
        captured.reading.cancel()
        transport.close()
