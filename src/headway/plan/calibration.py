"""Calibration: this machine's engine and trainer, measured at a few shapes, once for every model and kept in a file."""

import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from headway.base.cache import cache_folder
from headway.base.devices import resolve_device
from headway.base.files import write_atomic
from headway.base.processes import usable_cores
from headway.config.rl import RlSettings
from headway.launch.placement import visible_gpus
from headway.models.tiny import resolve_model
from headway.plan.host import measure_host
from headway.plan.measuring import EngineFigures, TrainerFigures, measure_engine, measure_trainer
from headway.plan.speeds import LinearEngine, LinearTrainer, Speeds

LONGEST_SECONDS = 120.0
"""What all measurements together may take."""

Say = Callable[[str], None]


class Calibration(msgspec.Struct, frozen=True):
    """Measurements of one model on one machine, with `threads` threads each where it computes on a CPU."""

    key: str
    model: str
    device: str
    cores: int
    threads: int
    engine: EngineFigures
    trainer: TrainerFigures
    measured_at: float
    host: float = 0.0
    """Seconds of a core that orchestrator and environment need for a reply."""

    def speeds(self, settings: RlSettings) -> Speeds:
        """The speeds of a layout. Other numbers of threads are taken to be faster or slower in proportion."""
        on_cpu = self.device == "cpu"
        threads = threads_of(settings, self.cores) if on_cpu else 1
        slower = self.threads / threads if on_cpu else 1.0
        engine = LinearEngine(
            prefill_seconds=self.engine.prefill,
            admission_seconds=self.engine.request,
            kv_tokens=self.engine.kv_tokens,
            max_running=settings.inference.max_running,
            update_seconds=self.trainer.publish,
            fixed=self.engine.fixed,
            per_sequence=self.engine.per_sequence,
            per_context_token=self.engine.per_context_token,
            slower=slower,
        )
        ranks = settings.placement.trainer_ranks
        trainer = LinearTrainer(
            publish_seconds=self.trainer.publish,
            fixed=self.trainer.fixed,
            per_token=self.trainer.per_token / ranks,
            slower=slower,
        )
        shared = float(self.cores) if on_cpu else None
        if not on_cpu and len(visible_gpus()) < ranks + settings.placement.engines:
            shared = 1.0  # they take turns
        return Speeds(engine, trainer, shared, float(threads), self.host if on_cpu else 0.0)

    def lines(self) -> list[str]:
        where = (
            f"{self.cores} cores, {self.threads} thread{'s' * (self.threads > 1)} each"
            if self.device == "cpu"
            else "GPU"
        )
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.measured_at))
        return [
            f"speeds of {self.model} were measured on this machine ({where}) on {when}: a decode step takes "
            f"{1e3 * self.engine.fixed:.2f} ms + {1e3 * self.engine.per_sequence:.3f} ms per sequence, a training step "
            f"{self.trainer.fixed:.3f} s + {1e3 * self.trainer.per_token:.3f} ms per token, publishing "
            f"{self.trainer.publish:.3f} s",
            self._host_line(),
        ]

    def _host_line(self) -> str:
        if self.device != "cpu" or not self.host:
            return "environments and the orchestrator take no time on the processor beside their recorded seconds"
        return (
            f"orchestrator and environment take {1e3 * self.host:.1f} ms of a core for a reply, as measured with "
            "reverse-text; whatever else an environment computes is left out"
        )


def threads_of(settings: RlSettings, cores: int) -> int:
    """Threads of each process on a CPU, as the launcher divides them."""
    placement = settings.placement
    return max(1, cores // (placement.trainer_ranks + placement.engines))


def calibration_file() -> Path:
    return cache_folder() / "plan.json"


def find_calibration(settings: RlSettings) -> Calibration | None:
    """Return what was measured of the settings' model on this machine; None where nothing was."""
    return next((one for one in _saved() if one.key == _key(settings)), None)


def calibrate(settings: RlSettings, say: Say) -> Calibration:
    """Measure engine and trainer one after the other, and keep the result. Raises HeadwayError where they fail."""
    deadline = time.monotonic() + LONGEST_SECONDS
    device, cores = _device(settings), usable_cores()
    threads = threads_of(settings, cores)
    environment = {"OMP_NUM_THREADS": str(threads)} if device == "cpu" else {}
    with TemporaryDirectory(prefix="headway-plan-") as name:
        say(f"measuring an engine that serves {settings.model.path} (at most two minutes in all)")
        engine = measure_engine(settings, Path(name), environment, deadline)
        say("measuring the trainer")
        trainer = measure_trainer(settings, Path(name), environment, deadline)
        if device == "cpu":
            say("measuring orchestrator and environment")
        host = measure_host(Path(name), deadline) if device == "cpu" else 0.0
    found = Calibration(
        key=_key(settings), model=settings.model.path, device=device, cores=cores, threads=threads,
        engine=engine, trainer=trainer, measured_at=time.time(), host=host,
    )  # fmt: skip
    others = [one for one in _saved() if one.key != found.key]
    calibration_file().parent.mkdir(parents=True, exist_ok=True)
    write_atomic(calibration_file(), msgspec.json.format(msgspec.json.encode([*others, found]), indent=1))
    say(f"saved in {calibration_file()}")
    return found


def _saved() -> list[Calibration]:
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(calibration_file().read_bytes(), type=list[Calibration])
    return []


def _device(settings: RlSettings) -> str:
    return resolve_device(settings.placement.device, bool(visible_gpus()))


def _key(settings: RlSettings) -> str:
    """Name what a measurement holds for: the model's shape, precision and adapter, the machine and its engine."""
    folder = resolve_model(settings.model.path, settings.model.family, weights=False)
    config = (folder / "config.json").read_bytes()
    model = settings.model.model_copy(update={"path": "", "family": None})
    parts = (
        model.model_dump_json(),
        settings.inference.engine,
        _device(settings),
        str(usable_cores()),
        str(settings.weights.type),
    )
    return sha256(config + "\n".join(parts).encode()).hexdigest()[:16]
