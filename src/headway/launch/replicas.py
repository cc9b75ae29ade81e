"""Several engines with the same weights on one machine: a server process each, supervised, and a router in front."""

import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from headway.base.errors import UsageError
from headway.base.processes import consecutive_ports, die_with_parent_command, free_port, usable_cores
from headway.config.inference import ServeSettings
from headway.config.loader import write_settings
from headway.core.runs import RunPaths
from headway.launch.joining import run_flags
from headway.launch.placement import gpus_per_engine, place_engines, visible_gpus
from headway.launch.process import ManagedProcess, ProcessSpec
from headway.launch.supervisor import Supervisor
from headway.transport.tls import client_context, scheme, server_context

ROUTER = "vllm-router"
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Addresses:
    """The ports of engines and of the router in front of them, None where there is none."""

    host: str
    engines: list[int]
    router: int | None
    scheme: str = "http"

    def url(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{port}"

    def explain(self) -> str:
        engines = ", ".join(self.url(port) for port in self.engines)
        if self.router is None:
            return f"serving at {engines}"
        return f"serving at {self.url(self.router)}, by session, from {engines}; send weights to each of these"


def run_replicas(
    settings: ServeSettings,
    count: int,
    *,
    run: RunPaths | None = None,
    url: str | None = None,
    name: str = "replica",
    router: bool = True,
    show: Callable[[str], None] = print,
) -> None:
    """Serve until SIGTERM or SIGINT, then end all. An engine that dies is restarted at its port.

    With `run` each engine joins it and the run's orchestrator chooses among them; otherwise a router does, where one
    is installed. Where the run is another host's, at `url`, engines end with it. Raises HeadwayError when a process
    keeps dying, UsageError when one refuses its settings.
    """
    command = find_router() if router and run is None else None
    addresses = plan_addresses(settings.inference.host, settings.inference.port, count, router=command is not None)
    encrypted = scheme(server_context(settings.tls, settings.inference.host))
    if encrypted == "https" and command is not None:
        raise UsageError("vllm-router does not speak TLS to engines; give --no-router, or leave tls.certificate out")
    addresses = replace(addresses, scheme=encrypted)
    folder = run.config if run is not None else Path(tempfile.mkdtemp(prefix="headway-serve-"))
    logs = run.logs if run is not None else folder
    file = folder / f"{name}.toml"
    write_settings(settings, file)
    join = [] if run is None else ["--join", str(run.root)] if url is None else ["--run", url, *run_flags(run)]
    specs = engine_specs(settings, addresses, file, name, join)
    if command is not None:
        specs.append(router_spec(command, addresses))
    show(f"starting {count} engines; logs: {logs}")
    ready = _ReadyMessage(addresses, show)
    processes = [ManagedProcess(spec, logs) for spec in specs]
    Supervisor(processes, progress=lambda: 0, on_tick=ready.poll, on_event=show).run()
    if run is None:
        # They ended because they were asked to, so their logs are not needed.
        shutil.rmtree(folder)


def plan_addresses(host: str, port: int, count: int, *, router: bool) -> Addresses:
    """Give the router the port that was asked for and engines those after it; port 0 means any that are free."""
    if count < 1:
        raise UsageError(f"--replicas must be at least 1 (got {count})")
    ports = consecutive_ports(host, port, count + router)
    return Addresses(host, ports[router:], ports[0] if router else None)


def engine_specs(
    settings: ServeSettings, addresses: Addresses, file: Path, name: str, join: list[str]
) -> list[ProcessSpec]:
    cuda = [] if settings.placement.device == "cpu" else visible_gpus()
    environments = place_engines(len(addresses.engines), cuda, usable_cores(), gpus_per_engine(settings.inference))
    serve = [sys.executable, "-m", "headway.cli.main", "serve", "@", str(file)]
    return [
        ProcessSpec(
            f"{name}-{index}",
            [*serve, *join, "--port", str(port), "--name", f"{name}-{index}"],
            environment,
            ends="--run" in join,
        )
        for index, (port, environment) in enumerate(zip(addresses.engines, environments, strict=True))
    ]


def router_spec(command: str, addresses: Addresses) -> ProcessSpec:
    """Start vllm-router so that requests of one `x-session-id` (an episode) go to one engine, whose cache has them."""
    assert addresses.router is not None
    argv = [command, "--host", addresses.host, "--port", str(addresses.router), "--policy", "consistent_hash"]
    argv += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "2"]
    # A restarted engine is back as soon as it answers.
    argv += ["--health-success-threshold", "1", "--log-level", "warning"]
    argv += ["--prometheus-port", str(free_port("127.0.0.1")), "--prometheus-host", "127.0.0.1"]
    argv += ["--worker-urls", *map(addresses.url, addresses.engines)]
    # Without the variable it logs every request, whatever the level.
    return ProcessSpec("router", die_with_parent_command(argv), {"RUST_LOG": "warn"})


def find_router() -> str | None:
    """Find the router's command: beside this Python, or on the path."""
    return shutil.which(ROUTER, path=str(Path(sys.executable).parent)) or shutil.which(ROUTER)


class _ReadyMessage:
    """Prints the addresses once, when everything answers."""

    def __init__(self, addresses: Addresses, show: Callable[[str], None]) -> None:
        self._addresses, self._show = addresses, show
        self._missing = [
            addresses.url(port) for port in [*addresses.engines, *([addresses.router] if addresses.router else [])]
        ]
        self._next = 0.0

    def poll(self) -> None:
        if not self._missing or time.monotonic() < self._next:
            return
        self._missing = [url for url in self._missing if not _answers(url)]
        self._next = time.monotonic() + _POLL_SECONDS
        if not self._missing:
            self._show(self._addresses.explain())


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1.0, context=client_context()) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
