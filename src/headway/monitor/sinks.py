"""Sinks for metrics besides the run's JSON lines: TensorBoard, Weights & Biases, Prometheus."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from headway.config.shared import TrackingSettings, WandbSettings
from headway.core.errors import HeadwayError, UsageError
from headway.core.runs import RunPaths
from headway.monitor.metrics import Sink
from headway.monitor.prometheus import PrometheusSink


def make_sinks(tracking: TrackingSettings, paths: RunPaths, process: str) -> list[Sink]:
    """The sinks that the settings ask for. Raises UsageError when what one needs is not installed."""
    sinks: list[Sink] = []
    if tracking.tensorboard:
        sinks.append(TensorBoardSink(paths, process))
    if tracking.wandb is not None:
        sinks.append(WandbSink(tracking.wandb, paths, process))
    if tracking.prometheus_port is not None:
        sinks.append(PrometheusSink(process, tracking.prometheus_port))
    return sinks


class TensorBoardSink:
    """Event files in `metrics/tensorboard/<process>`."""

    def __init__(self, paths: RunPaths, process: str) -> None:
        _demand("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer: Any = SummaryWriter(str(paths.metrics / "tensorboard" / process))
        except OSError as error:
            raise HeadwayError(f"{paths.metrics}: cannot write TensorBoard events: {error.strerror}") from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """One W&B run per process, grouped by the run's name; a resumed process continues its own."""

    def __init__(self, settings: WandbSettings, paths: RunPaths, process: str) -> None:
        _demand("wandb")
        import wandb

        name = paths.root.name
        try:
            self._run: Any = wandb.init(
                project=settings.project,
                entity=settings.entity,
                tags=settings.tags,
                mode=settings.mode,
                group=name,
                name=f"{name}-{process}",
                id=f"{name}-{process}",
                resume="allow",
                dir=str(paths.metrics),
            )
        except wandb.errors.Error as error:
            raise UsageError(f'tracking.wandb: {error}; log in with `wandb login`, or set mode = "offline"') from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _demand(package: str) -> None:
    if find_spec(package) is None:
        raise UsageError(f"tracking.{package} needs a package; install it with `pip install 'headway[tracking]'`")
