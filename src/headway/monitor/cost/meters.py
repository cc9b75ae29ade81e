"""Meters of energy: NVIDIA's counters of GPUs, RAPL's of processors, and estimates where there is neither."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

POWERCAP = Path("/sys/class/powercap")


class Meter(Protocol):
    """Counts joules since it was made. `measured` tells a counter of the hardware from an estimate."""

    measured: bool

    def joules(self) -> float: ...


class NvmlMeter:
    """The energy counters of some GPUs, which NVIDIA's driver keeps (Volta and newer). `nvml` is the module pynvml."""

    measured = True

    def __init__(self, nvml: Any, gpus: Sequence[str]) -> None:
        """Raises pynvml's error where a GPU has no counter."""
        nvml.nvmlInit()
        self._nvml = nvml
        self._handles = [self._handle(gpu) for gpu in gpus]
        self._first = self._total()

    def joules(self) -> float:
        return self._total() - self._first

    def _handle(self, gpu: str) -> Any:
        by_index = gpu.isdigit()
        return (
            self._nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if by_index else self._nvml.nvmlDeviceGetHandleByUUID(gpu)
        )

    def _total(self) -> float:
        return float(sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles)) / 1000.0


class RaplMeter:
    """The energy counters of all processor packages of this machine, whoever uses them. They wrap around."""

    measured = True

    def __init__(self, root: Path = POWERCAP) -> None:
        """Raises OSError where there are none that this user may read."""
        packages = [
            folder for folder in sorted(root.glob("intel-rapl:*")) if _read(folder / "name").startswith("package")
        ]
        if not packages:
            raise FileNotFoundError(root)
        self._counters = [(folder / "energy_uj", int(_read(folder / "max_energy_range_uj"))) for folder in packages]
        self._last = [int(_read(file)) for file, _ in self._counters]
        self._sum = 0

    def joules(self) -> float:
        for index, (file, most) in enumerate(self._counters):
            now = int(_read(file))
            self._sum += (now - self._last[index]) % (most + 1)
            self._last[index] = now
        return self._sum / 1e6


class CoreEstimate:
    """Processor seconds of this process and of all that it has started, times the power of a busy core."""

    measured = False

    def __init__(self, watts: float) -> None:
        self._watts = watts
        self._seconds: dict[tuple[int, float], float] = {}
        self._first = self._total()

    def joules(self) -> float:
        return self._watts * (self._total() - self._first)

    def _total(self) -> float:
        """Add up what is alive, and what those that have ended were last seen with."""
        with suppress(psutil.Error):
            own = psutil.Process()
            for process in (own, *own.children(recursive=True)):
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    self._seconds[process.pid, process.create_time()] = times.user + times.system
        return sum(self._seconds.values())


class GpuEstimate:
    """A fixed power for every GPU, all the time."""

    measured = False

    def __init__(self, gpus: int, watts: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._watts, self._clock, self._began = gpus * watts, clock, clock()

    def joules(self) -> float:
        return self._watts * (self._clock() - self._began)


def gpu_meter(gpus: Sequence[str], watts: float) -> Meter:
    """Measure where the package nvidia-ml-py and the GPUs allow it, else estimate."""
    try:
        import pynvml

        return NvmlMeter(pynvml, gpus)
    except Exception:  # not installed, no driver, no counter: each has an error of its own
        return GpuEstimate(len(gpus), watts)


def core_meter(watts: float, root: Path = POWERCAP) -> Meter:
    """Measure where this machine has counters that we may read, else estimate."""
    try:
        return RaplMeter(root)
    except (OSError, ValueError):
        return CoreEstimate(watts)


def _read(file: Path) -> str:
    return file.read_text().strip()
