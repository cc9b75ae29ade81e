"""Our sandboxes as verifiers' runtimes, and theirs as ours.

Verifiers is imported by the tests: it takes seconds, which a worker that runs other files need not spend.
"""

import asyncio
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import pytest
from sandbox_kinds import needs_bubblewrap

from headway.base.errors import HeadwayError
from headway.sandboxes.local.bubblewrap import Bubblewrap
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import SandboxError

pytestmark = pytest.mark.skipif(find_spec("verifiers") is None, reason="needs verifiers (extra verifiers)")


def their_runtime() -> Any:
    from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime

    return SubprocessRuntime(SubprocessConfig())


async def until_logged(reader: Any) -> None:
    """Wait for what a process in the background writes first; until it has started there is no file."""
    from verifiers.v1.errors import SandboxError as RuntimeFailure

    for _ in range(6000):
        with suppress(RuntimeFailure, HeadwayError):
            if b"up" in await reader.read("log"):
                return
        await asyncio.sleep(0.02)
    raise AssertionError("nothing was logged")


async def use_runtime(runtime: Any) -> None:
    """What verifiers does with a runtime; the same for theirs and for ours."""
    from verifiers.v1.errors import SandboxError as RuntimeFailure

    run, env = runtime, {"WORD": "out"}
    await run.write("a/b", b"data")
    assert await run.read("a/b") == b"data"
    with pytest.raises(RuntimeFailure):
        await run.read("a/b", max_bytes=2)
    done = await run.run(["sh", "-c", "cat a/b; echo $WORD $TASK; exit 3"], env)
    assert (done.exit_code, done.stdout) == (3, "dataout\n")
    view = run.with_env({"TASK": "mine"})
    assert (await view.run(["sh", "-c", "echo $WORD $TASK"], env)).stdout == "out mine\n"
    assert await run.alive()
    process = await run.open_process(["cat"], {})
    await process.write(b"hello")
    assert await anext(aiter(process.stdout)) == b"hello"
    assert await process.poll() is None
    await process.kill()
    assert await process.wait() != 0
    await run.run_background(["sh", "-c", "echo up; sleep 100"], {}, "log")
    await until_logged(run)


@needs_bubblewrap
def test_a_sandbox_of_ours_is_a_runtime_of_theirs() -> None:
    from headway.sandboxes.verifiers import HeadwayRuntime

    async def main() -> None:
        backend = Bubblewrap()
        runtime = HeadwayRuntime(backend, Recipe(files={"given": b"x"}))
        await runtime.start()
        try:
            assert await runtime.read("given") == b"x"
            await use_runtime(runtime)
            assert runtime.type == "headway" and runtime.info.id
        finally:
            await runtime.stop()
            await backend.close()
        assert not await runtime.alive()

    asyncio.run(main())


def test_the_same_steps_hold_for_a_runtime_of_theirs() -> None:
    async def main() -> None:
        runtime = their_runtime()
        await runtime.start()
        try:
            await use_runtime(runtime)
        finally:
            await runtime.stop()

    asyncio.run(main())


def test_a_runtime_of_theirs_is_a_sandbox_of_ours() -> None:
    from headway.sandboxes.verifiers import RuntimeSandbox

    async def main() -> None:
        runtime = their_runtime()
        await runtime.start()
        async with RuntimeSandbox(runtime) as box:
            await box.write("a/b", b"data")
            assert await box.read("a/b") == await box.read("/workspace/a/b") == b"data"
            done = await box.run(
                ["sh", "-c", "cat; cat b; echo $WORD; exit 3"], stdin=b"in ", cwd="a", env={"WORD": "out"}
            )
            assert (done.exit_code, done.stdout) == (3, "in dataout\n")
            assert (await box.run(["sleep", "100"], seconds=0.2)).limit == "time"
            with pytest.raises(SandboxError):
                await box.read("absent")
            with pytest.raises(SandboxError, match="can't be forked"):
                await box.fork()
            await box.background(["sh", "-c", "echo up; sleep 100"], log="log")
            await until_logged(box)
        assert runtime.stopped

    asyncio.run(main())
