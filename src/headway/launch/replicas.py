"""Several engines with the same weights on one machine: a server process each, supervised, and a router in front."""

import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headway.config.inference import ServeSettings
from headway.config.loader import write_settings
from headway.core.errors import UsageError
from headway.core.processes import consecutive_ports, die_with_parent_command, free_port, usable_cores
from headway.core.runs import RunPaths
from headway.launch.placement import place_engines, visible_gpus
from headway.launch.process import ManagedProcess, ProcessSpec
from headway.launch.supervisor import Supervisor

ROUTER = "vllm-router"
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Layout:
    """Where things listen. `router` is None where there is none in front."""

    host: str
    engines: list[int]
    router: int | None

    def url(self, port: int) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{port}"

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
    name: str = "replica",
    router: bool = True,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until SIGTERM or SIGINT, then end all. An engine that dies is started again at its port.

    With `run` each engine joins it and the run's orchestrator chooses among them; otherwise a router does, where one
    is installed. Raises HeadwayError when a process keeps dying, UsageError when one refuses its settings.
    """
    command = find_router() if router and run is None else None
    layout = plan(settings.inference.host, settings.inference.port, count, router=command is not None)
    folder = run.config if run is not None else Path(tempfile.mkdtemp(prefix="headway-serve-"))
    logs = run.logs if run is not None else folder
    file = folder / f"{name}.toml"
    write_settings(settings, file)
    specs = engine_specs(settings, layout, file, name, run)
    if command is not None:
        specs.append(router_spec(command, layout))
    say(f"starting {count} engines; logs: {logs}")
    ready = _Announcement(layout, say)
    processes = [ManagedProcess(spec, logs) for spec in specs]
    Supervisor(processes, progress=lambda: 0, on_tick=ready.look, on_event=say).run()
    if run is None:
        # They ended because they were asked to, so nobody will look for a reason.
        shutil.rmtree(folder)


def plan(host: str, port: int, count: int, *, router: bool) -> Layout:
    """A router takes the port that was asked for, and engines the ones after it. Port 0 means any that are free."""
    if count < 1:
        raise UsageError(f"--replicas must be at least 1 (got {count})")
    ports = consecutive_ports(host, port, count + router)
    return Layout(host, ports[router:], ports[0] if router else None)


def engine_specs(
    settings: ServeSettings, layout: Layout, file: Path, name: str, run: RunPaths | None
) -> list[ProcessSpec]:
    vllm = settings.inference.vllm
    devices = vllm.get("tensor_parallel_size", 1) * vllm.get("pipeline_parallel_size", 1)
    cuda = [] if settings.placement.device == "cpu" else visible_gpus()
    environments = place_engines(len(layout.engines), cuda, usable_cores(), devices)
    serve = [sys.executable, "-m", "headway.cli.main", "serve", "@", str(file)]
    join = [] if run is None else ["--join", str(run.root)]
    return [
        ProcessSpec(f"{name}-{index}", [*serve, *join, "--port", str(port), "--name", f"{name}-{index}"], environment)
        for index, (port, environment) in enumerate(zip(layout.engines, environments, strict=True))
    ]


def router_spec(command: str, layout: Layout) -> ProcessSpec:
    """vllm-router sends requests of one `x-session-id`, which is an episode's, to one engine, whose cache knows it."""
    assert layout.router is not None
    argv = [command, "--host", layout.host, "--port", str(layout.router), "--policy", "consistent_hash"]
    argv += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "2"]
    # An engine that was started again is back as soon as it answers.
    argv += ["--health-success-threshold", "1", "--log-level", "warning"]
    argv += ["--prometheus-port", str(free_port("127.0.0.1")), "--prometheus-host", "127.0.0.1"]
    argv += ["--worker-urls", *map(layout.url, layout.engines)]
    # Without the variable it logs every request, whatever the level.
    return ProcessSpec("router", die_with_parent_command(argv), {"RUST_LOG": "warn"})


def find_router() -> str | None:
    """The router's command: beside this Python, or on the path."""
    return shutil.which(ROUTER, path=str(Path(sys.executable).parent)) or shutil.which(ROUTER)


class _Announcement:
    """Says, once, where everything is when everything answers."""

    def __init__(self, layout: Layout, say: Callable[[str], None]) -> None:
        self._layout, self._say = layout, say
        self._missing = [layout.url(port) for port in [*layout.engines, *([layout.router] if layout.router else [])]]
        self._next = 0.0

    def look(self) -> None:
        if not self._missing or time.monotonic() < self._next:
            return
        self._missing = [url for url in self._missing if not _answers(url)]
        self._next = time.monotonic() + _LOOK_SECONDS
        if not self._missing:
            self._say(self._layout.explain())


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1.0) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
