"""Adapters to services that rent out sandboxes, against a stand-in of their HTTP interfaces: the verbs are the same."""

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sandbox_kinds
import test_sandbox
from rented_standin import KEY
from sandbox_kinds import needs_bubblewrap

from headway.sandboxes.kinds import make_backend
from headway.sandboxes.local.bubblewrap import Bubblewrap
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import Limits, SandboxError, SandboxGoneError, SandboxUnavailableError

pytestmark = needs_bubblewrap
KINDS = ["e2b:base", "daytona:my-snapshot", "prime:python:3.12-slim"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    argv = [sys.executable, str(Path(__file__).with_name("rented_standin.py"))]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield json.loads(process.stdout.readline())["url"]
    process.kill()
    process.wait()


@pytest.fixture(autouse=True)
def services(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", KEY)
    monkeypatch.setenv("E2B_API_URL", f"{url}/e2b")
    monkeypatch.setenv("E2B_SANDBOX_URL", f"{url}/envd")
    monkeypatch.setenv("DAYTONA_API_KEY", KEY)
    monkeypatch.setenv("DAYTONA_API_URL", f"{url}/daytona")
    monkeypatch.setenv("PRIME_API_KEY", KEY)
    monkeypatch.setenv("PRIME_API_BASE_URL", f"{url}/prime")
    monkeypatch.setattr(test_sandbox, "make", make_backend)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "conforms",
    [
        test_sandbox.test_files,
        test_sandbox.test_output_is_bounded_and_says_so,
        test_sandbox.test_time_is_bounded_and_the_sandbox_lives_on,
        test_sandbox.test_forks_share_the_past_and_nothing_else,
    ],
)
def test_the_verbs_are_those_of_other_kinds(kind: str, conforms: Callable[[str], None], url: str) -> None:
    conforms(kind)
    assert json.load(urllib.request.urlopen(f"{url}/boxes", timeout=30)) == 0  # all were given back


@pytest.mark.parametrize("kind", KINDS)
def test_commands_and_recipes(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    test_sandbox.test_commands(kind, monkeypatch)
    test_sandbox.test_recipes_prepare_a_folder_that_nobody_can_change(kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_background_processes_and_what_services_cannot_do(kind: str) -> None:
    async def main() -> None:
        backend = make_backend(kind)
        try:
            async with await backend.create() as box:
                process = await box.background(["sh", "-c", "echo $WORD; sleep 1000"], env={"WORD": "hi"}, log="log")
                await box.run(["sh", "-c", "until grep -q hi log; do sleep 0.05; done"])
                assert process.poll() is None
                await process.kill()
                assert await process.wait() == 137 == process.poll()
                short = await box.background(["sh", "-c", "exit 3"], log="log")
                assert await short.wait() == 3
                if kind.startswith("prime"):
                    with pytest.raises(SandboxError, match="show no ports"):
                        await box.expose(80)
                else:
                    assert (await box.expose(80)).startswith("https://80-")
                with pytest.raises(SandboxError, match="can't reach a port"):
                    await box.forward(80)
                with pytest.raises(SandboxError, match="use background"):
                    await box.open_process(["true"])
            with pytest.raises(SandboxError, match="can't see /usr"):
                await backend.create(Recipe(readable=(Path("/usr"),)))
        finally:
            await backend.close()

    asyncio.run(main())


class Aio:
    """A function of an SDK whose asynchronous form is its attribute `aio`."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.aio = work


class ModalStandIn:
    """The parts of Modal's SDK that are used, around a bubblewrap sandbox. Modal's own service was never asked."""

    def __init__(self) -> None:
        self.live = 0
        self.App = SimpleNamespace(lookup=Aio(self._lookup))
        self.Image = SimpleNamespace(from_registry=lambda name: name)
        self.Sandbox = SimpleNamespace(create=Aio(self._create))

    async def _lookup(self, name: str, create_if_missing: bool) -> str:
        assert create_if_missing
        return name

    async def _create(self, *argv: str, app: str, image: str, block_network: bool, **rest: Any) -> Any:
        assert (app, image, block_network, argv) == ("headway", "python:3.12-slim", True, ("sleep", "infinity"))
        assert rest["memory"] >= 1 and rest["idle_timeout"] > 0
        backend = Bubblewrap()
        box = await backend.create(limits=Limits(output=100 << 20))
        self.live += 1

        async def execute(*argv: str, timeout: int) -> Any:
            done = await box.run(argv, seconds=timeout)
            texts = {"stdout": done.stdout, "stderr": done.stderr}
            streams = {name: SimpleNamespace(read=Aio(partial(_value, text))) for name, text in texts.items()}
            return SimpleNamespace(wait=Aio(partial(_value, done.exit_code)), **streams)

        async def terminate() -> None:
            await backend.close()
            self.live -= 1

        async def write(data: bytes, path: str) -> None:
            await box.write(path, data)

        files = SimpleNamespace(write_bytes=Aio(write), read_bytes=Aio(box.read))
        return SimpleNamespace(object_id=box.name, exec=Aio(execute), terminate=Aio(terminate), filesystem=files)


async def _value(value: Any) -> Any:
    return value


def test_modal_by_the_parts_of_its_sdk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in = ModalStandIn()
    monkeypatch.setitem(sys.modules, "modal", stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: stand_in)
    for conforms in (test_sandbox.test_files, test_sandbox.test_forks_share_the_past_and_nothing_else):
        conforms("modal:python:3.12-slim")
    test_sandbox.test_commands("modal:python:3.12-slim", monkeypatch)
    assert stand_in.live == 0
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SandboxUnavailableError, match="pip install modal"):
        make_backend("modal:python:3.12-slim")


@pytest.mark.parametrize("kind", KINDS)
def test_failures_of_a_service_are_told(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = kind.partition(":")[0]
    key = f"{name.upper()}_API_KEY"

    async def refused() -> None:
        backend = make_backend(kind)
        with pytest.raises(SandboxError, match=f"{name} answered POST .* with 401"):
            await backend.create()
        await backend.close()

    async def unreachable() -> None:
        backend = make_backend(kind)
        with pytest.raises(SandboxGoneError, match=f"{name} does not answer"):
            await backend.create()
        await backend.close()

    monkeypatch.setenv(key, "wrong")
    asyncio.run(refused())
    monkeypatch.setenv({"prime": "PRIME_API_BASE_URL"}.get(name, f"{name.upper()}_API_URL"), "http://127.0.0.1:9")
    asyncio.run(unreachable())
    monkeypatch.delenv(key)
    with pytest.raises(SandboxUnavailableError, match=f"need a key in {key}"):
        make_backend(kind)
    assert sandbox_kinds.unavailable(kind)
