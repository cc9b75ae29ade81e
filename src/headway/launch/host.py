"""A host on one machine: its trainer process with the service, its engines, and the loop that keeps them alive."""

import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import msgspec
from rich.console import Console

from headway.base.errors import HeadwayError
from headway.base.files import write_atomic
from headway.base.processes import free_port
from headway.config.host import HostSettings
from headway.config.inference import ServeSettings
from headway.config.loader import write_settings
from headway.config.shared import LoraSettings
from headway.core.runs import RunPaths
from headway.launch.mps import side_by_side
from headway.launch.placement import Placement, place_here
from headway.launch.process import ManagedProcess, ProcessSpec
from headway.launch.rl import supervisor_lock
from headway.launch.supervisor import Supervisor
from headway.monitor.attempts import recorded_attempt
from headway.transport.control.folder import FolderControl
from headway.transport.control.tokens import write_token
from headway.transport.tenants.tenancy import ADDRESS_FILE, ENGINES_FILE, JOIN_TOKEN_FILE
from headway.transport.tls import scheme, server_context


def run_host(settings: HostSettings, paths: RunPaths, console: Console | None = None) -> None:
    """Serve tenants until asked to stop. Raises HeadwayError when a process keeps dying."""
    console = console or Console()

    def show(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    placement = place_here(settings.placement, settings.inference)
    with ExitStack() as stack:
        write_token(paths)
        _write_join_token(paths)
        stack.enter_context(supervisor_lock(paths))
        attempt = stack.enter_context(recorded_attempt(paths))
        settings = _with_port(settings, paths)
        _write_settings(settings, paths)
        engines = _engine_addresses(settings, paths)
        control = FolderControl(paths)
        control.clear()
        for line in (placement.explanation, *_greeting(settings, paths)):
            show(line)
        specs = host_specs(paths, placement, list(engines.values()))
        if settings.inference.engine == "embedded":
            specs = stack.enter_context(side_by_side(specs, paths.logs, show))
        processes = [ManagedProcess(spec, paths.logs) for spec in specs]
        supervisor = Supervisor(processes, progress=lambda: 0, on_event=show, stop_asked=control.stop_asked)
        try:
            supervisor.run()
        except HeadwayError as error:
            attempt.end("failed", str(error), supervisor.failed.log.name if supervisor.failed else "")
            raise
        attempt.end("stopped", "asked to stop")


def host_specs(paths: RunPaths, placement: Placement, engines: Sequence[str]) -> list[ProcessSpec]:
    """List the trainer, which has the service, and the engines at their addresses."""
    python = [sys.executable, "-m", "headway.cli.main"]
    serve = [*python, "serve", "@", str(paths.config / "inference.toml"), "--join", str(paths.root)]
    specs = [ProcessSpec("trainer", [*python, "host", "--trainer", str(paths.root)], placement.trainer)]
    for index, (url, environment) in enumerate(zip(engines, placement.engines, strict=True)):
        name, port = f"inference-{index}", url.rpartition(":")[2]
        specs.append(ProcessSpec(name, [*serve, "--port", port, "--name", name], environment))
    return specs


def _write_settings(settings: HostSettings, paths: RunPaths) -> None:
    write_settings(settings, paths.config / "host.toml")
    serve = {field: getattr(settings, field) for field in ServeSettings.model_fields}
    # Closed from the start: before the first tenant there is nobody to serve either.
    serve["inference"] = settings.inference.model_copy(update={"tenants": True})
    # vLLM makes room for adapters when it starts, or never.
    serve["model"] = settings.model.model_copy(update={"lora": LoraSettings(rank=settings.host.rank)})
    write_settings(ServeSettings.model_validate(serve), paths.config / "inference.toml")


def _write_join_token(paths: RunPaths) -> None:
    """Make the secret with which tenants join, once. The host's own token stays with its owner."""
    file = paths.control / JOIN_TOKEN_FILE
    if not file.exists():
        write_atomic(file, secrets.token_urlsafe(32))
        file.chmod(0o600)


def _with_port(settings: HostSettings, paths: RunPaths) -> HostSettings:
    """Choose a port where any will do; it stays the host's, since tenants come back to it."""
    if settings.host.port:
        return settings
    port = free_port(settings.host.address)
    return settings.model_copy(update={"host": settings.host.model_copy(update={"port": port})})


def _engine_addresses(settings: HostSettings, paths: RunPaths) -> dict[str, str]:
    """Return the addresses of engines by name. A host that is started again has them where they were."""
    file, host = paths.control / ENGINES_FILE, settings.inference.host
    known = msgspec.json.decode(file.read_bytes(), type=dict[str, str]) if file.exists() else {}
    protocol = scheme(server_context(settings.tls, host))
    shown = f"[{host}]" if ":" in host else host
    names = [f"inference-{index}" for index in range(settings.placement.engines)]
    engines = {name: known.get(name) or f"{protocol}://{shown}:{free_port(host)}" for name in names}
    write_atomic(file, msgspec.json.encode(engines))
    return engines


def _greeting(settings: HostSettings, paths: RunPaths) -> Iterator[str]:
    host = settings.host
    shown = f"[{host.address}]" if ":" in host.address else host.address
    url = f"{scheme(server_context(settings.tls, host.address))}://{shown}:{host.port}"
    write_atomic(paths.control / ADDRESS_FILE, f"{url}\n")
    yield f"host folder: {paths.root}"
    yield f"tenants join with: headway rl @ RUN.toml --host {url}"
    yield f"  and HEADWAY_TOKEN_FILE={paths.control / JOIN_TOKEN_FILE}; on this machine --host {paths.root} does"
