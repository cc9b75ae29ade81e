"""Sinks for metrics besides the run's JSON lines: TensorBoard, Weights & Biases, Prometheus."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from headway.base.errors import HeadwayError, UsageError
from headway.base.extras import install_command
from headway.config.shared import TrackingSettings
from headway.core.runs import RunPaths
from headway.monitor.metrics import Sink
from headway.monitor.prometheus import PrometheusSink


def make_sinks(tracking: TrackingSettings, paths: RunPaths, process: str) -> list[Sink]:
    """The sinks that the settings ask for. Raises UsageError when what one needs is not installed."""
    sinks: list[Sink] = []
    if tracking.tensorboard:
        sinks.append(TensorBoardSink(paths, process))
    if tracking.wandb is not None:
        from headway.monitor.wandb_run import WandbSink

        sinks.append(WandbSink(tracking.wandb, paths, process))
    if tracking.prometheus_port is not None:
        sinks.append(PrometheusSink(process, tracking.prometheus_port, tracking.prometheus_host))
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


def _demand(package: str) -> None:
    if find_spec(package) is None:
        raise UsageError(f"tracking.{package} needs a package: {install_command('tracking')}")
