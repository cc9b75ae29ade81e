"""A whole run on one machine: its processes, how they are started, and the loop that keeps them alive."""

import fcntl
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from headway.config.commands import write_process_settings
from headway.config.rl import RlSettings
from headway.core.errors import UsageError
from headway.core.files import write_atomic
from headway.core.processes import free_port, usable_cores
from headway.core.runs import RunPaths
from headway.launch.placement import Placement, gpus_of, place, visible_gpus
from headway.launch.process import ManagedProcess, ProcessSpec
from headway.launch.sharing import MemoryPlan, gpu_memory, plan_memory
from headway.launch.supervisor import Supervisor
from headway.launch.view import RunView
from headway.models.registry import load_config
from headway.models.tiny import resolve_model


def run_rl(settings: RlSettings, paths: RunPaths, console: Console | None = None) -> bool:
    """Run until the last step (True) or until the user stops it (False). Raises HeadwayError on failure."""
    if not settings.orchestrator.envs:
        raise UsageError("no environment to train on; add an [[orchestrator.envs]] table with an id")
    console = console or Console()
    placement = place(settings.placement, visible_gpus(), usable_cores())
    memory = _plan_memory(settings, placement)
    write_process_settings(settings, paths.config)
    _write_token(paths)
    with _supervisor_lock(paths), RunView(paths, settings.max_steps, console) as view:
        view.event(f"run folder: {paths.root}")
        for line in (placement.explanation, *memory.lines):
            view.event(line)
        processes = [ManagedProcess(spec, paths.logs) for spec in process_specs(settings, paths, placement, memory)]
        supervisor = Supervisor(processes, progress=lambda: view.step, on_tick=view.tick, on_event=view.event)
        finished = supervisor.run()
        if not finished:
            view.event(f"stopped; continue with: headway rl --resume {paths.root}")
    return finished


def process_specs(
    settings: RlSettings, paths: RunPaths, placement: Placement, memory: MemoryPlan | None = None
) -> list[ProcessSpec]:
    """List the engines (unless the settings name running ones), the orchestrator and the trainer."""
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
    trainer = [*python, "train", "@", str(paths.config / "trainer.toml")]
    specs.append(ProcessSpec("trainer", trainer, placement.trainer, ends=True))
    return specs


def _plan_memory(settings: RlSettings, placement: Placement) -> MemoryPlan:
    """Divide GPUs that trainer and engines share; there are none on CPU or with engines elsewhere."""
    gpus = gpus_of(placement.trainer)
    if not gpus or settings.orchestrator.engines:
        return MemoryPlan([None] * len(placement.engines), [])
    config = load_config(resolve_model(settings.model.path, settings.model.family))
    every = dict.fromkeys(gpus + [gpu for engine in placement.engines for gpu in gpus_of(engine)])
    return plan_memory(settings, config, placement, gpu_memory(list(every)))


def _kv_flags(kv_bytes: int | None) -> list[str]:
    return [] if kv_bytes is None else ["--inference.kv_memory_gb", f"{kv_bytes / 1e9:.6g}"]


def _write_token(paths: RunPaths) -> None:
    """Write the secret that admin routes of this run's engines demand."""
    paths.control.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = paths.control / "token"
    if not token.exists():
        write_atomic(token, secrets.token_urlsafe(32))
        token.chmod(0o600)


@contextmanager
def _supervisor_lock(paths: RunPaths) -> Iterator[None]:
    """Refuse to run a run twice. The lock goes with the process, however it ends."""
    with (paths.control / "supervisor.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{paths.root} is being run by another `headway rl`; stop that one first") from None
        for stale in (paths.control / "engines").glob("*.json"):
            stale.unlink(missing_ok=True)
        yield
