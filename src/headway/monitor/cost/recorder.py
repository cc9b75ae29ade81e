"""The recorder of a run's cost: one line of metrics per trained step, with the energy since the last one."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from headway.config.cost import CostSettings
from headway.core.runs import RunPaths
from headway.monitor.cost.meters import Meter, core_meter, gpu_meter
from headway.monitor.metrics import MetricsWriter


@dataclass(frozen=True)
class Devices:
    """The GPUs of a run on this host, or its cores where it has none, by who uses them. What is shared is halved."""

    trainer: float
    engines: float
    gpus: tuple[str, ...] = ()

    def hour(self, prices: CostSettings) -> float:
        """Return the price of one device for an hour."""
        return prices.gpu_hour if self.gpus else prices.core_hour


def split_devices(trainer: list[str], engines: list[list[str]], ranks: int, cores: int) -> Devices:
    """Divide GPUs among the trainer and the engines that see them; without any, the cores among their processes."""
    gpus = tuple(dict.fromkeys([*trainer, *(gpu for each in engines for gpu in each)]))
    if not gpus:
        share = ranks / (ranks + len(engines)) if ranks + len(engines) else 0.5
        return Devices(cores * share, cores * (1 - share))
    serving = {gpu for each in engines for gpu in each}
    shared = len(serving & set(trainer))
    return Devices(len(trainer) - shared / 2, len(serving) - shared / 2, gpus)


class CostRecorder:
    """Writes `metrics/cost.jsonl`. Energy of steps that are trained again after a crash was spent, too, so no line of
    it is ever dropped."""

    def __init__(self, paths: RunPaths, prices: CostSettings, devices: Devices) -> None:
        self._prices, self._devices = prices, devices
        self._meters: dict[str, Meter] = {"cpu": core_meter(prices.core_watts)}
        if devices.gpus:
            self._meters["gpu"] = gpu_meter(devices.gpus, prices.gpu_watts)
        self._writer = MetricsWriter(paths, "cost")
        self._began = self._last = time.time()
        self._joules = dict.fromkeys(self._meters, 0.0)
        self._waits = {"trainer": 0.0, "orchestrator": 0.0}
        self._step = 0

    def update(self, process: str, line: Mapping[str, float]) -> None:
        """Take note of a line of metrics; a line of the trainer ends a step. Lines of earlier attempts are old news."""
        if line.get("time", 0.0) < self._began:
            return
        if process == "orchestrator":
            self._waits["orchestrator"] += line.get("wait_for_trainer_seconds", 0.0)
        elif process == "trainer":
            self._waits["trainer"] += line.get("wait_seconds", 0.0)
            self._step = int(line["step"])
            self._record()

    def close(self) -> None:
        """Record what was spent since the last step. A run that was refused before its first one leaves no line."""
        if self._step or self._writer.path.stat().st_size:
            self._record()
        self._writer.close()

    def _record(self) -> None:
        now, devices = time.time(), self._devices
        used = {name: meter.joules() for name, meter in self._meters.items()}
        spent = {name: used[name] - self._joules[name] for name in used}
        seconds, self._last, self._joules = now - self._last, now, used
        joules = sum(spent.values())
        guessed = sum(spent[name] for name, meter in self._meters.items() if not meter.measured)
        second = devices.hour(self._prices) / 3600
        waits, self._waits = self._waits, {"trainer": 0.0, "orchestrator": 0.0}
        self._writer.log(
            self._step,
            {
                "seconds": seconds,
                "devices/trainer": devices.trainer,
                "devices/engines": devices.engines,
                "devices/gpus": float(len(devices.gpus)),
                "energy/joules": joules,
                "energy/estimated_joules": guessed,
                "energy/watts": joules / seconds if seconds > 0 else 0.0,
                **{f"energy/{name}_joules": value for name, value in spent.items()},
                "money": (devices.trainer + devices.engines) * seconds * second + joules / 3.6e6 * self._prices.kwh,
                "money/trainer_waiting": devices.trainer * waits["trainer"] * second,
                "money/engines_waiting": devices.engines * waits["orchestrator"] * second,
            },
        )
