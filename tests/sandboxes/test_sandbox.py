"""The verbs of a sandbox, the same for every kind: commands, files, limits, ports, snapshots."""

import asyncio
import contextlib
import os
import socket
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sandbox_kinds import EVERY, make, needs_bubblewrap, needs_gvisor

from headway.sandboxes.local.bubblewrap import keeper_command
from headway.sandboxes.local.cgroups import Cgroups
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import Limits, Sandbox, SandboxError, SandboxGoneError

LIMITS = Limits(memory=128 << 20, processes=32, disk=16 << 20, seconds=60, output=4096)


def inside(
    kind: str, use: Callable[[Sandbox], Awaitable[None]], recipe: Recipe | None = None, limits: Limits = LIMITS
) -> None:
    async def main() -> None:
        backend = make(kind)
        try:
            async with await backend.create(recipe, limits) as box:
                await use(box)
        finally:
            await backend.close()

    asyncio.run(main())


@pytest.mark.parametrize("kind", EVERY)
def test_commands(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")

    async def use(box: Sandbox) -> None:
        done = await box.run(["sh", "-c", 'cat; echo "$WORD"; echo bad >&2; exit 3'], stdin=b"in ", env={"WORD": "out"})
        assert (done.exit_code, done.stdout, done.stderr, done.limit) == (3, "in out\n", "bad\n", None)
        assert (await box.run(["no-such-program"])).exit_code == 127
        assert (await box.run(["sh", "-c", "kill -9 $$"])).exit_code == 137
        assert "secret" not in (await box.run(["env"])).stdout
        await box.run(["mkdir", "sub"])
        assert (await box.run(["sh", "-c", "basename $PWD"], cwd="sub")).stdout == "sub\n"
        long = "x" * 100_000
        assert (await box.run(["sh", "-c", 'printf %s "$1" | wc -c', "sh", long])).stdout.strip() == "100000"

    inside(kind, use)


@pytest.mark.parametrize("kind", EVERY)
def test_files(kind: str) -> None:
    data = bytes(range(256)) * 1000

    async def use(box: Sandbox) -> None:
        await box.write("a/b c/d", data)
        assert await box.read("a/b c/d") == data
        assert await box.read("/workspace/a/b c/d") == data
        with pytest.raises(SandboxError, match="longer than 10 bytes"):
            await box.read("a/b c/d", 10)
        with pytest.raises(SandboxError, match="no/such"):
            await box.read("no/such")

    inside(kind, use)


@pytest.mark.parametrize("kind", EVERY)
def test_output_is_bounded_and_says_so(kind: str) -> None:
    async def use(box: Sandbox) -> None:
        done = await box.run(["sh", "-c", "echo first; head -c 100000 /dev/zero | tr '\\0' x; echo last"])
        assert done.limit == "output" and done.left_out == 100_011 - 4096
        assert done.stdout.startswith("first") and done.stdout.endswith("last\n") and len(done.stdout) < 4200
        assert f"[{done.left_out} bytes left out]" in done.stdout
        flood = await box.run(["sh", "-c", "yes; echo never"])
        assert flood.limit == "output" and flood.exit_code == 137

    inside(kind, use)


@pytest.mark.parametrize("kind", EVERY)
def test_time_is_bounded_and_the_sandbox_lives_on(kind: str) -> None:
    seconds = 0.5 if kind in ("bubblewrap", "process") else 5.0  # enough to begin, on a machine that is busy

    async def use(box: Sandbox) -> None:
        done = await box.run(["sh", "-c", "echo begun; sleep 1000 & sleep 1000"], seconds=seconds)
        assert (done.limit, done.stdout, done.exit_code) == ("time", "begun\n", 137)
        assert (await box.run(["echo", "on"])).stdout == "on\n"

    inside(kind, use)


@pytest.mark.parametrize(
    ("limit", "script"),
    [
        ("memory", "x = bytearray(300 << 20)"),
        ("processes", "import os\nfor _ in range(100):\n  if os.fork() == 0: __import__('time').sleep(60)"),
        ("disk", "open('big', 'wb').write(bytes(40 << 20))"),
    ],
)
@needs_bubblewrap
def test_limits_are_told_apart(limit: str, script: str) -> None:
    async def use(box: Sandbox) -> None:
        if limit != "disk" and Cgroups().problem:
            pytest.skip("no control groups here: rlimits bound each process, and nothing counts")
        done = await box.run(["python3", "-c", script])
        assert done.exit_code != 0 and done.limit == limit, done
        if limit != "processes":  # their children still sleep
            assert (await box.run(["true"])).exit_code == 0

    inside("bubblewrap", use)


@needs_gvisor
@pytest.mark.skipif(bool(Cgroups().problem), reason="no control groups here")
def test_a_kernel_of_its_own_dies_of_its_limit_and_says_which() -> None:
    async def use(box: Sandbox) -> None:
        done = await box.run(["python3", "-c", "x = bytearray(b'x' * (300 << 20))"])
        assert (done.exit_code, done.limit) == (137, "memory")
        with pytest.raises(SandboxGoneError):
            await box.run(["true"])

    inside("gvisor", use)


@pytest.mark.parametrize("kind", EVERY)
def test_a_server_inside_is_reached_from_outside(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def use(box: Sandbox) -> None:
        await box.write("index.html", b"hello")
        server = ["python3", "-u", "-m", "http.server", "--bind", "127.0.0.1", str(port)]
        process = await box.background(server, log="server.log")
        url = await box.expose(port)
        for _ in range(1200):
            with contextlib.suppress(OSError):
                body = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{url}/index.html", timeout=5).read())
                break
            await asyncio.sleep(0.05)
        assert body == b"hello"
        assert b"GET /index.html" in await box.read("server.log")
        assert process.poll() is None
        await process.kill()
        assert await process.wait() == 137

    inside(kind, use)


@pytest.mark.parametrize("kind", EVERY)
def test_one_port_of_this_machine_is_reached_from_inside(kind: str) -> None:
    script = "import socket, sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5).recv(9).decode())"

    async def use(box: Sandbox) -> None:
        async def greet(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"policy")
            writer.close()

        servers = [await asyncio.start_server(greet, "127.0.0.1", 0) for _ in range(2)]
        ports = [server.sockets[0].getsockname()[1] for server in servers]
        inner = await box.forward(ports[0])
        assert (await box.run(["python3", "-c", script, str(inner)])).stdout == "policy\n"
        other = await box.run(["python3", "-c", script, str(ports[1])])
        assert (other.exit_code == 0) == (kind == "process")
        for server in servers:
            server.close()

    inside(kind, use)


@pytest.mark.parametrize("kind", EVERY)
def test_forks_share_the_past_and_nothing_else(kind: str) -> None:
    async def use(box: Sandbox) -> None:
        await box.write("a", b"before")
        await box.run(["ln", "-s", "a", "link"])
        async with await box.fork() as other:
            await box.write("a", b"after")
            assert await other.read("link") == b"before"
            await other.write("b", b"mine")
            with pytest.raises(SandboxError):
                await box.read("b")

    inside(kind, use)


@pytest.mark.parametrize("kind", EVERY)
def test_recipes_prepare_a_folder_that_nobody_can_change(kind: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base").write_text("base")
    (tmp_path / "link").symlink_to("/etc/passwd")
    recipe = Recipe(tmp_path, {"sub/added": b"added"}, ("sh", "-c", "cat sub/base sub/added > both"))

    async def main() -> None:
        backend = make(kind)
        try:
            for _ in range(2):
                async with await backend.create(recipe, LIMITS) as box:
                    assert await box.read("both") == b"baseadded"
                    assert (await box.run(["readlink", "link"])).stdout == "/etc/passwd\n"
                    await box.write("sub/base", b"changed")
                    await box.run(["rm", "-r", "both"])
            bad = Recipe(setup=("sh", "-c", "echo no luck >&2; exit 1"))
            with pytest.raises(SandboxError, match="no luck"):
                await backend.create(bad, LIMITS)
        finally:
            await backend.close()

    asyncio.run(main())
    assert (tmp_path / "sub" / "base").read_text() == "base"


@needs_bubblewrap
def test_a_sandbox_that_ends_says_so() -> None:
    async def use(box: Sandbox) -> None:
        running = asyncio.ensure_future(box.run(["sleep", "1000"]))
        await box.run(["true"])
        await box.stop()
        with pytest.raises(SandboxGoneError):
            await running
        with pytest.raises(SandboxGoneError):
            await box.run(["true"])

    inside("bubblewrap", use)


@needs_bubblewrap
def test_the_keeper_in_python_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.sandboxes.local.bubblewrap.keeper_command", lambda state: keeper_command(state, False))

    async def use(box: Sandbox) -> None:
        assert "keeper" in (await box.run(["cat", "/proc/1/cmdline"])).stdout
        done = await box.run(["sh", "-c", 'cat; echo "$WORD"; exit 3'], stdin=b"in ", env={"WORD": "out"})
        assert (done.exit_code, done.stdout) == (3, "in out\n")
        assert (await box.run(["nope"])).exit_code == 127
        assert (await box.run(["sleep", "1000"], seconds=0.3)).limit == "time"
        assert (await box.run(["cat", "/proc/1/environ"])).exit_code != 0
        server = ["python3", "-m", "http.server", "--bind", "127.0.0.1", "8123"]
        process = await box.background(server, log="log")
        url = await box.expose(8123)
        for _ in range(1200):
            with contextlib.suppress(OSError):
                assert await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).status) == 200
                break
            await asyncio.sleep(0.05)
        await process.kill()
        assert await process.wait() == 137

    inside("bubblewrap", use)


@needs_bubblewrap
def test_the_sandbox_is_not_root_on_this_machine() -> None:
    async def use(box: Sandbox) -> None:
        process = await box.open_process(["sh", "-c", "echo up; exec sleep 86401"])
        await process.stdout.readline()
        owners = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if b"86401" in (path / "cmdline").read_bytes():
                    owners.append(path.stat().st_uid)
        assert owners and 0 not in owners
        assert all(owner == (os.geteuid() or 65533) for owner in owners)
        await process.kill()

    inside("bubblewrap", use)


def test_limits_that_are_none_are_refused() -> None:
    with pytest.raises(SandboxError, match="memory must be a positive number"):
        Limits(memory=0)


@needs_bubblewrap
def test_without_control_groups_rlimits_bound_processes_and_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headway.sandboxes.local.launched.Cgroups", lambda: Cgroups(Path("/nowhere"), "0::/\n"))
    fork = "import os\nfor n in range(100):\n  print(n, flush=True)\n  if os.fork() == 0: __import__('time').sleep(60)"

    async def use(box: Sandbox) -> None:
        big = await box.run(["python3", "-c", "x = bytearray(300 << 20)"])
        assert "MemoryError" in big.stderr
        async with await box.fork() as other:  # the bound is one sandbox's, not that of all together
            for one in (box, other):
                done = await one.run(["python3", "-c", fork])
                assert done.exit_code != 0 and 20 < int(done.stdout.split()[-1]) < 32, done

    inside("bubblewrap", use)
    assert "no control groups" in caplog.text
