"""A whole run on one machine: its processes, how they are started, and the loop that keeps them alive."""

import fcntl
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console

from headway.base.errors import HeadwayError, UsageError
from headway.base.files import write_atomic
from headway.base.processes import free_port, usable_cores
from headway.config.commands import write_process_settings
from headway.config.rl import RlSettings
from headway.config.shared import TrackingSettings, WandbSettings
from headway.core.routing import Role
from headway.core.runs import RunPaths
from headway.launch.hosts import ROLES, RunHost, role_of
from headway.launch.mps import side_by_side
from headway.launch.placement import Placement, gpus_of, place_here
from headway.launch.process import ManagedProcess, ProcessSpec
from headway.launch.sharing import MemoryPlan, gpu_memory, plan_memory
from headway.launch.summary import summary_lines
from headway.launch.supervisor import Supervisor
from headway.launch.view import RunView
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.monitor.attempts import Attempt, recorded_attempt
from headway.monitor.audit.live import LiveAudit
from headway.monitor.cost.recorder import CostRecorder, Devices, split_devices
from headway.monitor.prometheus import PrometheusExporter
from headway.monitor.wandb_run import WandbRun
from headway.transport.control.folder import FolderControl
from headway.transport.control.tokens import write_token
from headway.transport.tenants.tenancy import Tenancy

Tracker = Callable[[str, dict[str, float]], None]
"""Takes a line of metrics that a process has written."""


def run_rl(
    settings: RlSettings,
    paths: RunPaths,
    console: Console | None = None,
    roles: Collection[str] = ROLES,
    tenancy: Tenancy | None = None,
) -> bool:
    """Run until the last step (True) or until the user stops it (False). Raises HeadwayError on failure.

    Only processes of these `roles` start here; others join from other hosts. With a `tenancy` a host trains the run.
    """
    console = console or Console()
    computes = bool({"trainer", "inference"} & set(roles)) and tenancy is None
    placement = _place(settings, computes=computes)
    memory = _plan_memory(settings, placement)
    write_process_settings(settings, paths.config)
    write_token(paths)
    with ExitStack() as stack:
        stack.enter_context(supervisor_lock(paths))
        attempt = stack.enter_context(recorded_attempt(paths))
        exporter = _exporter(settings.tracking, paths, stack)
        wandb_run = _wandb_run(settings.tracking.wandb, paths, stack)
        trackers: list[Tracker] = [tracker.update for tracker in (exporter, wandb_run) if tracker]
        view = stack.enter_context(RunView(paths, settings.max_steps, console, _tell_all(trackers)))
        trackers += _own_trackers(settings, paths, placement, view, stack)
        stack.callback(trackers.clear)  # before they close: what the view reads when it leaves comes too late for them
        view.event(f"run folder: {paths.root}")
        control = FolderControl(paths)
        control.clear()
        host = RunHost(settings.control, settings.tls, paths) if settings.control.host is not None else None
        layout = (placement.explanation, *memory.lines)
        for line in (*_addresses(paths, host, exporter), *layout, *_tenant_lines(tenancy)):
            view.event(line)
        specs = process_specs(settings, paths, placement, memory, at_host=tenancy is not None)
        specs = [spec for spec in specs if role_of(spec.name) in roles]
        if settings.inference.engine == "embedded":
            specs = stack.enter_context(side_by_side(specs, paths.logs, view.event))
        supervisor = Supervisor(
            [ManagedProcess(spec, paths.logs) for spec in specs],
            progress=lambda: view.step,
            on_tick=view.tick,
            on_event=view.event,
            stop_asked=control.stop_asked,
        )
        finished = _supervise(supervisor, attempt, host, view)
    for line in summary_lines(paths, finished=finished):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return finished


def _place(settings: RlSettings, *, computes: bool) -> Placement:
    """Place processes on this machine, which needs no GPU where it neither trains nor serves."""
    device = settings.placement.device if computes else "cpu"
    return place_here(settings.placement.model_copy(update={"device": device}), settings.inference)


def _tell_all(trackers: list[Tracker]) -> Tracker:
    """A tracker that passes lines on to all that are in the list when a line comes."""

    def update(process: str, line: dict[str, float]) -> None:
        for tracker in trackers:
            tracker(process, line)

    return update


def _addresses(paths: RunPaths, host: RunHost | None, exporter: PrometheusExporter | None) -> Iterator[str]:
    """Say under which addresses the run can be joined and watched."""
    if host:
        yield f"control service: {host.url}; its token is in {paths.control / 'token'}"
    if exporter:
        yield f"Prometheus metrics: {exporter.url}"


def _tenant_lines(tenancy: Tenancy | None) -> Iterator[str]:
    if tenancy:
        yield f"tenant {tenancy.name} of the host at {tenancy.url}"


def _own_trackers(
    settings: RlSettings, paths: RunPaths, placement: Placement, view: RunView, stack: ExitStack
) -> list[Tracker]:
    """Start what follows a run's metrics in its own folder: the audit, unless it is off, and the costs."""
    trackers: list[Tracker] = []
    if settings.audit:
        live_audit = LiveAudit(paths, view.event)
        stack.callback(live_audit.close)
        trackers.append(live_audit.update)
    recorder = CostRecorder(paths, settings.cost, _devices(placement, settings.placement.trainer_ranks))
    stack.callback(recorder.close)
    return [*trackers, recorder.update]


def _supervise(supervisor: Supervisor, attempt: Attempt, host: RunHost | None, view: RunView) -> bool:
    """Keep the processes alive until the run has finished (True) or is asked to stop (False); record how it ended."""
    finished = False
    try:
        finished = supervisor.run()
    except HeadwayError as error:
        attempt.end("failed", str(error), supervisor.failed.log.name if supervisor.failed else "")
        raise
    finally:
        if host:
            host.end(finished)
        view.catch_up()
    if not finished:
        attempt.end("stopped", "asked to stop")
    return finished


def _devices(placement: Placement, ranks: int) -> Devices:
    """Say which devices of this host the run pays for."""
    engines = [gpus_of(environment) for environment in placement.engines]
    return split_devices(gpus_of(placement.trainer), engines, ranks, usable_cores())


def _exporter(tracking: TrackingSettings, paths: RunPaths, stack: ExitStack) -> PrometheusExporter | None:
    """Start the run's exporter where the settings ask for one, and record its address."""
    if tracking.prometheus_port is None:
        return None
    exporter = PrometheusExporter(tracking.prometheus_port, tracking.prometheus_host)
    stack.callback(exporter.close)
    write_atomic(paths.control / "prometheus", f"{exporter.url}\n")
    return exporter


def _wandb_run(settings: WandbSettings | None, paths: RunPaths, stack: ExitStack) -> WandbRun | None:
    """Start or continue the run at W&B where the settings ask for one."""
    if settings is None:
        return None
    run = WandbRun(settings, paths)
    stack.callback(run.close)
    return run


def process_specs(
    settings: RlSettings,
    paths: RunPaths,
    placement: Placement,
    memory: MemoryPlan | None = None,
    *,
    at_host: bool = False,
) -> list[ProcessSpec]:
    """List the engines (unless the settings name running ones), the orchestrator and the trainer, which may be one that
    lets a host train."""
    python = [sys.executable, "-m", "headway.cli.main"]
    engines = [] if settings.orchestrator.engines else placement.engines
    serve = [*python, "serve", "@", str(paths.config / "inference.toml"), "--join", str(paths.root)]
    specs = [
        ProcessSpec(
            f"inference-{index}",
            # One port for all attempts, so that clients of an engine that died find the restarted one.
            [
                *(*serve, "--port", str(free_port(settings.inference.host)), "--name", f"inference-{index}"),
                *_kv_flags(memory.kv_bytes[index] if memory else None),
                *_role_flags(settings.placement.role(index)),
            ],
            environment,
        )
        for index, environment in enumerate(engines)
    ]
    specs.append(
        ProcessSpec(
            "orchestrator",
            [*python, "orchestrate", "@", str(paths.config / "orchestrator.toml")],
            {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            ends=True,
        )
    )
    trainer = [*python, "train", "@", str(paths.config / "trainer.toml"), *(["--at-host"] if at_host else [])]
    specs.append(ProcessSpec("trainer", trainer, placement.trainer, ends=True))
    return specs


def _plan_memory(settings: RlSettings, placement: Placement) -> MemoryPlan:
    """Divide GPUs that trainer and engines share; there are none on CPU or with engines elsewhere."""
    gpus = gpus_of(placement.trainer)
    if not gpus or settings.orchestrator.engines:
        return MemoryPlan([None] * len(placement.engines), [])
    config = load_config(resolve_model(settings.model.path, settings.model.family), settings.model.implementation)
    every = dict.fromkeys(gpus + [gpu for engine in placement.engines for gpu in gpus_of(engine)])
    return plan_memory(settings, config, placement, gpu_memory(list(every)))


def _kv_flags(kv_bytes: int | None) -> list[str]:
    return [] if kv_bytes is None else ["--inference.kv_memory_gb", f"{kv_bytes / 1e9:.6g}"]


def _role_flags(role: Role | None) -> list[str]:
    return [] if role is None else ["--inference.role", role]


@contextmanager
def supervisor_lock(paths: RunPaths) -> Iterator[None]:
    """Refuse to run a run twice. The lock goes with the process, however it ends."""
    with (paths.control / "supervisor.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{paths.root} is being run by another `headway rl`; stop that one first") from None
        for stale in (paths.control / "engines").glob("*.json"):
            stale.unlink(missing_ok=True)
        yield
