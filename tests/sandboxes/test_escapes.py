"""Every attempt to get out is held by the back ends that isolate, and succeeds under `process`: the tests can fail."""

import asyncio
import contextlib
import ctypes
import os
import secrets
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from escapes import ATTEMPTS, PRELUDE
from sandbox_kinds import ISOLATING, make, param, unavailable

from headway.sandboxes.backend import Backend
from headway.sandboxes.sandbox import Limits, Sandbox

LIMITS = Limits(memory=96 << 20, processes=32, disk=16 << 20, seconds=60)
OTHER_SECONDS = "86123"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Things of the host worth reaching, by the variable that names each."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "file").write_text("secret")
    shm_file = Path("/dev/shm") / f"headway-{secrets.token_hex(6)}"
    shm_file.write_text("secret")
    abstract = secrets.token_hex(8)
    servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    unix_path = folder / "s"
    servers[1].bind(str(unix_path))
    servers[2].bind("\0" + abstract)
    udp = socket.socket(type=socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    for server in servers:
        server.listen()
        threading.Thread(target=_greet, args=(server,), daemon=True).start()
    threading.Thread(target=_answer, args=(udp,), daemon=True).start()
    libc = ctypes.CDLL(None)
    key = 0x48570000 + os.getpid() % 0xFFFF
    segment = libc.shmget(key, 4096, 0o1666)
    victim = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "headway-victim"],
        env={"TOKEN": "secret"},
    )
    yield {
        "HOST_FILE": str(folder / "file"),
        "HOST_LINK": str(folder / "link"),
        "HOST_HOME": str(Path.home()),
        "SHM_FILE": str(shm_file),
        "PORT": str(servers[0].getsockname()[1]),
        "UDP_PORT": str(udp.getsockname()[1]),
        "UNIX_SOCKET": str(unix_path),
        "ABSTRACT_SOCKET": abstract,
        "SHM_KEY": str(key),
        "VICTIM": str(victim.pid),
        "OTHER_FILE": f"other-{secrets.token_hex(6)}",
        "OTHER_SECONDS": OTHER_SECONDS,
    }
    victim.kill()
    victim.wait()
    libc.shmctl(segment, 0, None)
    shm_file.unlink()
    for server in [*servers, udp]:
        server.close()


def _greet(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            connection.send(b"host")


def _answer(udp: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            _, address = udp.recvfrom(16)
            udp.sendto(b"host", address)


@asynccontextmanager
async def another_episode(backend: Backend, host: dict[str, str]) -> AsyncIterator[Sandbox]:
    async with await backend.create(limits=LIMITS) as other:
        await other.write(host["OTHER_FILE"], b"secret")
        await other.background(["sleep", OTHER_SECONDS], log="log")
        yield other


def outcomes(kind: str, host: dict[str, str]) -> dict[str, str]:
    """The output of every attempt, each in a sandbox of its own, a few at once."""

    async def main() -> dict[str, str]:
        backend = make(kind)
        at_once = asyncio.Semaphore(4)

        async def attempt(code: str) -> str:
            async with at_once, await backend.create(limits=LIMITS) as box:
                script = PRELUDE + textwrap.dedent(code)
                result = await box.run(["/usr/bin/python3", "-c", script], env=host)
                return f"{result.stdout}{result.stderr}"

        try:
            async with another_episode(backend, host):
                said = await asyncio.gather(*(attempt(code) for code in ATTEMPTS.values()))
        finally:
            await backend.close()
        return dict(zip(ATTEMPTS, said, strict=True))

    return asyncio.run(main())


def test_there_are_enough_attempts() -> None:
    assert len(ATTEMPTS) >= 40


@pytest.mark.parametrize(
    "kind", [param("bubblewrap"), param("gvisor", pytest.mark.slow), param("container", pytest.mark.slow)]
)
def test_every_attempt_is_held(kind: str, host: dict[str, str]) -> None:
    said = outcomes(kind, host)
    # Podman can't bound the number of files on a tmpfs.
    known = ["make files beyond the limit"] if kind == "container" else []
    assert [name for name, text in said.items() if "ESCAPED" in text] == known
    # Held by the sandbox, and not by an attempt that can't be made at all.
    assert [name for name, text in said.items() if "SyntaxError" in text or "NameError" in text] == []


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root, who can do all of it outside")
def test_every_attempt_succeeds_without_isolation(host: dict[str, str]) -> None:
    said = outcomes("process", host)
    assert {name: text[-300:] for name, text in said.items() if "ESCAPED" not in text} == {}


@pytest.mark.parametrize("kind", [*ISOLATING, "process"])
def test_links_lead_nowhere_outside(kind: str, host: dict[str, str], tmp_path: Path) -> None:
    """The verbs of the sandbox itself follow links inside it, where there is nothing to find."""

    async def main() -> tuple[bool, bool]:
        backend = make(kind)
        async with await backend.create(limits=LIMITS) as box:
            await box.run(["ln", "-s", host["HOST_FILE"], "file"])
            await box.run(["ln", "-s", str(tmp_path), "folder"])
            with contextlib.suppress(Exception):
                await box.write("folder/new", b"x")
            try:
                leaked = await box.read("file") == b"secret"
            except Exception:
                leaked = False
        await backend.close()
        return leaked, (tmp_path / "new").exists()

    assert asyncio.run(main()) == (kind == "process", kind == "process")


@pytest.mark.parametrize("kind", [*ISOLATING, "process"])
def test_no_process_outlives_its_sandbox(kind: str) -> None:
    mark = f"86{secrets.randbelow(10**6):06d}"
    script = "import os, sys\nif os.fork() == 0:\n  os.setsid()\n"
    script += "  if os.fork() == 0: os.execvp('sleep', ['sleep', sys.argv[1]])"

    async def main() -> None:
        backend = make(kind)
        async with await backend.create(limits=LIMITS) as box:
            done = await box.run(["/usr/bin/python3", "-c", script, mark])
            assert done.exit_code == 0, done
        await backend.close()

    asyncio.run(main())
    left = _processes_with(mark)
    assert bool(left) == (kind == "process")
    for pid in left:
        os.kill(pid, 9)


def _processes_with(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def test_a_missing_kind_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for kind, word in (("bubblewrap", "apt-get install bubblewrap"), ("gvisor", "apt-get install runsc")):
        assert word in unavailable(kind)
