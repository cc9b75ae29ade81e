"""The host service: who may use it, what it bounds, and what is left when either side is killed."""

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from leftovers import leftovers, swept_clean
from sandbox_kinds import needs_bubblewrap, start_host

from headway.base.errors import UsageError
from headway.cli.main import run
from headway.sandboxes.kinds import make_backend
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.remote.snapshots import SnapshotStore, digest
from headway.sandboxes.remote.wire import read_access
from headway.sandboxes.sandbox import Limits, SandboxError, SandboxGoneError, Snapshot

CLIENT = """
import asyncio, sys
from headway.sandboxes.kinds import make_backend
async def main():
    backend = make_backend("host:" + sys.argv[1])
    for _ in range(2):
        box = await backend.create()
        await box.background(["sh", "-c", "setsid sleep 86400 & sleep 86400"], log="log")
        await box.run(["true"])
    print("holds two", flush=True)
    await box.run(["sleep", "86400"], seconds=86400)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[tuple[subprocess.Popen[str], Path]]":
    folder = tmp_path_factory.mktemp("host")
    (folder / "shown").mkdir()
    (folder / "shown" / "file").write_text("shown")
    (folder / "shown" / "out").symlink_to("/root")
    process, access = start_host(folder / "access.json", "--most", "2", "--show", str(folder / "shown"))
    yield process, access
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert leftovers(process.pid) == []


def status(access: Path, token: str | None = None) -> dict[str, int]:
    known = read_access(access)
    headers = {"Authorization": f"Bearer {token or known.token}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{known.url}/v1/status", headers=headers), timeout=30
    ) as answer:
        found: dict[str, int] = json.load(answer)
        return found


def until_empty(access: Path) -> bool:
    deadline = time.monotonic() + 120
    while status(access)["sandboxes"] and time.monotonic() < deadline:
        time.sleep(0.05)
    return status(access)["sandboxes"] == 0


@needs_bubblewrap
def test_only_the_token_opens_the_door(host: "tuple[subprocess.Popen[str], Path]", tmp_path: Path) -> None:
    access = host[1]
    assert access.stat().st_mode & 0o777 == 0o600
    with pytest.raises(urllib.error.HTTPError, match="401"):
        status(access, "guess")
    forged = tmp_path / "access.json"
    forged.write_text(json.dumps({"url": read_access(access).url, "token": "guess"}))
    forged.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        make_backend(f"host:{forged}")
    forged.chmod(0o600)

    async def main() -> None:
        backend = make_backend(f"host:{forged}")
        with pytest.raises(SandboxError, match="does not know the token"):
            await backend.create()
        await backend.close()

    asyncio.run(main())
    with pytest.raises(UsageError, match="not the access file"):
        make_backend(f"host:{tmp_path}/none.json")


@needs_bubblewrap
def test_a_host_bounds_what_clients_get(host: "tuple[subprocess.Popen[str], Path]") -> None:
    access = host[1]
    shown = access.parent / "shown"

    async def main() -> None:
        backend, other = make_backend(f"host:{access}"), make_backend(f"host:{access}")
        try:
            greedy = Limits(memory=1 << 50, seconds=1e9)
            async with await backend.create(Recipe(readable=(shown / "file",)), greedy) as box:
                assert box.limits.memory < 1 << 50 and box.limits.seconds == 3600
                assert await box.read(str(shown / "file")) == b"shown"
                async with await backend.create():  # of two places, one client holds both
                    later = [asyncio.ensure_future(backend.create()) for _ in range(2)]
                    await asyncio.sleep(0)
                    fair = asyncio.ensure_future(other.create())
                    await asyncio.sleep(0.5)
                    assert not fair.done() and not any(one.done() for one in later)
                first = await fair  # the client that holds none, though it asked last
                assert not any(one.done() for one in later)
                await first.stop()
                await (await later[0]).stop()
                await (await later[1]).stop()
            for path in (Path("/root"), shown / "out", shown / "absent"):
                with pytest.raises(SandboxError, match="shows no such folder"):
                    await backend.create(Recipe(readable=(path,)))
        finally:
            await backend.close()
            await other.close()

    asyncio.run(main())
    assert until_empty(access)


@needs_bubblewrap
def test_what_a_killed_client_held_ends(host: "tuple[subprocess.Popen[str], Path]") -> None:
    process, access = host
    client = subprocess.Popen([sys.executable, "-c", CLIENT, str(access)], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None and client.stdout.readline() == "holds two\n"
    assert status(access) == {"sessions": 1, "sandboxes": 2}
    client.kill()
    client.wait()
    assert until_empty(access)
    deadline = time.monotonic() + 120

    def held() -> list[str]:
        return [path for path in leftovers(process.pid) if "cgroup" in path or "/proc/" in path]

    while held() and time.monotonic() < deadline:  # the host forgets a sandbox just before its group is removed
        time.sleep(0.05)
    assert held() == []


@needs_bubblewrap
def test_a_killed_host_ends_what_it_ran_and_its_clients_go_on_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, access = start_host(tmp_path / "access.json")

    async def main() -> None:
        backend = make_backend(f"host:{access}")
        box = await backend.create(Recipe(files={"a": b"1"}))
        running = asyncio.ensure_future(box.run(["sleep", "86400"], seconds=3600))
        assert await box.read("a") == b"1"
        assert leftovers(process.pid)  # the check can fail
        process.kill()
        process.wait()
        with pytest.raises(SandboxGoneError):
            await running
        with pytest.raises(SandboxGoneError):
            await box.run(["true"])
        await box.stop()
        monkeypatch.setattr("headway.sandboxes.remote.client.HostBackend.patience", 0.0)
        with pytest.raises(SandboxError, match="no sandboxes from the host"):
            await backend.create()
        port = read_access(access).url.rpartition(":")[2]
        after, _ = start_host(access, "--port", port)  # with the token of the first
        try:
            assert swept_clean(process.pid)
            async with await backend.create() as box:
                assert (await box.run(["echo", "on"])).stdout == "on\n"
        finally:
            after.terminate()
            after.wait()
        await backend.close()

    asyncio.run(main())


def test_snapshots_are_kept_by_digest_and_bounded(tmp_path: Path) -> None:
    async def main() -> None:
        store = SnapshotStore(tmp_path, most=250)
        kept = [Snapshot(bytes([number]) * 100) for number in range(3)]
        for snapshot in kept[:2]:
            await store.keep(snapshot)
        assert await store.get(digest(kept[0])) == kept[0]
        await store.keep(kept[2])  # the one not used for longest goes
        assert [await store.get(digest(one)) is None for one in kept] == [False, True, False]
        assert len(list(tmp_path.iterdir())) == 2

        async def other() -> "AsyncIterator[bytes]":
            yield b"something else"

        with pytest.raises(SandboxError, match="not the snapshot that was announced"):
            await store.put(digest(kept[1]), other(), 1000)
        with pytest.raises(SandboxError, match="may have 5 bytes"):
            await store.put(digest(kept[1]), other(), 5)
        assert len(list(tmp_path.iterdir())) == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--most", "0"], "--most must be at least 1"),
        (["--show", "/no/such/folder"], "no such folder"),
        (["--sandbox", "host:/a"], "can't ask another host"),
        (["--port", "99999"], "from 0 to 65535"),
    ],
)
def test_wrong_options_are_refused(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sandboxes", *argv]) == 2
    assert problem in capsys.readouterr().err
