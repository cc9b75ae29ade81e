"""A control service over a real socket, and members of it."""

import json
import random
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
SMALL_RUN = """
max_steps = {steps}
seq_len = 128
[trainer.checkpoints]
interval = 2
[orchestrator]
batch_size = 16
group_size = 4
filters = {{ zero_advantage = false }}
[orchestrator.sampling]
max_tokens = 8
[[orchestrator.envs]]
id = "reverse-text"
workers = {{ max = 1 }}
"""
ROUTES = [
    ("GET", "/v1/status"),
    ("PUT", "/v1/members/a"),
    ("DELETE", "/v1/members/a"),
    ("PUT", "/v1/trainer_hosts/a"),
    ("DELETE", "/v1/trainer_hosts/a"),
    ("POST", "/v1/announcements"),
    ("GET", "/v1/announcements/latest"),
    ("PUT", "/v1/rollouts"),
    ("POST", "/v1/stop"),
    ("POST", "/v1/finish"),
    ("GET", "/v1/settings/trainer"),
    ("GET", "/v1/files/logs"),
    ("GET", "/v1/files/logs/a_001.log"),
    ("PUT", "/v1/files/logs/a_001.log?offset=0"),
    ("GET", "/anything/else"),
]


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
            with urllib.request.urlopen(request, timeout=60) as reply:
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


@dataclass(frozen=True)
class Malformed:
    """A request that has the token, and says nothing that the service may act on."""

    method: str
    route: str
    body: bytes


def malformed(count: int, rng: random.Random) -> Iterator[Malformed]:
    bodies = [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"name": 3}', b'{"version": "x"}', b'{"version": -1}', b"9" * 5000,
        b'{"name": "a", "role": "king", "host": "h", "started": 1}',
        b'{"name": "b", "role": "engine", "host": "h", "started": 1, "url": "file:///etc/passwd"}',
        b'{"name": "a", "role": "engine", "host": "h", "started": 1, "url": "http://x:1", "extra": 1}',
        b'{"name": "../up", "role": "engine", "host": "h", "started": 1, "url": "http://x:1"}',
        b'{"name": "a", "role": "trainer", "host": "h1", "started": 9, "checkpoints": [3, 1]}',
        b'"http://not.tcp:1"', b'"tcp://host:port"', b'{"version": 1, "fingerprint": 2, "transport": {}}',
    ]  # fmt: skip
    writing = [
        (method, route) for method, route in ROUTES if method != "GET" and route not in ("/v1/stop", "/v1/finish")
    ]
    names = ["a", "..", "%2e%2e%2fup", "a%00b", "x" * 300, "a%20b", "%c3%bc", ".hidden"]
    for _ in range(count):
        method, route = rng.choice(writing)
        if "files" in route:
            name = rng.choice(["..%2f..%2frun.json", "run.json", "x.toml", "%2e%2e", "a_001.log"])
            offset = rng.choice(["-1", "x", "1e9", "99999999"])
            route = f"/v1/files/{rng.choice(['logs', 'control', 'config', '..'])}/{name}?offset={offset}"
        elif "members" in route:
            route = f"/v1/members/{rng.choice(names)}"
        body = rng.choice(bodies)
        if rng.random() < 0.5:
            body = bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
        yield Malformed(method, route, body)


def check_malformed(message: Malformed, status: int) -> None:
    """Demand a refusal; who is no member may leave, and nothing is written beyond the end of a file."""
    nothing = message.method == "DELETE" or "offset=99999999" in message.route
    assert status in (400, 404, 405, 409) or (status == 200 and nothing), (message, status)
