"""A control service over a real socket, and members of it."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.config.shared import RunSettings
from headway.core.runs import RunPaths
from headway.monitor.runs import create_run
from headway.transport.control.client import ControlClient
from headway.transport.control.service import ControlService
from headway.transport.control.tokens import write_token
from headway.transport.http_thread import HttpThread

TOKEN = "the-secret-of-this-run"


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Service:
    paths: RunPaths
    clock: Clock
    control: ControlService
    url: str

    def client(self, token: str = TOKEN) -> ControlClient:
        return ControlClient(self.url, token)

    def call(self, method: str, route: str, body: bytes | None = None, token: str | None = TOKEN) -> tuple[int, bytes]:
        """Make a request by other means than our client."""
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        request = urllib.request.Request(self.url + route, data=body, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def files(self) -> dict[str, bytes]:
        """Everything in the run folder, to see that nothing changed."""
        root = self.paths.root
        return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


@contextmanager
def serving(folder: Path) -> Iterator[Service]:
    paths = create_run(RunSettings(name="run", output_dir=folder), "rl")
    write_token(paths)
    (paths.config / "trainer.toml").write_text("max_steps = 7\n")
    clock = Clock()
    control = ControlService(paths, TOKEN, clock)
    thread = HttpThread(control.app, "127.0.0.1", 0, "control")
    try:
        yield Service(paths, clock, control, f"http://127.0.0.1:{thread.port}")
    finally:
        thread.close()


def decoded(answer: tuple[int, bytes]) -> object:
    status, body = answer
    assert status == 200, body
    return json.loads(body)
