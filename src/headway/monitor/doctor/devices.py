"""Which processors there are, and whether torch can use them."""

import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from headway.core.devices import query_gpus
from headway.core.processes import usable_cores
from headway.monitor.doctor.finding import Finding
from headway.monitor.doctor.packages import torch_build
from headway.monitor.doctor.pins import release

OLDEST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}
"""The oldest NVIDIA driver that runs a CUDA major version."""


def check_devices() -> Iterator[Finding]:
    yield _cpu()
    yield from _gpus()


def _cpu() -> Finding:
    info = _read("/proc/cpuinfo")
    name = re.search(r"model name\s*:\s*(.+)", info)
    cores = usable_cores()
    bfloat16 = re.search(r"\b(bf16|avx512_bf16|amx_bf16)\b", info) is not None
    text = f"{cores} cores, {name.group(1) if name else platform.machine()}"
    return Finding(
        "cpu", "ok", text + (", bfloat16 instructions" if bfloat16 else ", float32 (no bfloat16 instructions)")
    )


def _gpus() -> Iterator[Finding]:
    cuda = torch_build().get("cuda")
    gpus = [row for row in query_gpus("name,memory.total,driver_version", timeout=2.5) if row[1].isdigit()]
    if not gpus:
        if Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
            text = "an NVIDIA driver is there, but it shows no device"
            yield Finding(
                "gpu", "warning", text, "run `nvidia-smi` to see why; in a container, start it with --gpus all"
            )
        else:
            yield Finding("gpu", "note", "no NVIDIA device: everything runs on the CPU")
        return
    for name, memory, _ in gpus:
        yield Finding("gpu", "ok", f"{name}, {int(memory) / 1024:.0f} GiB")
    driver = gpus[0][2]
    if cuda is None:
        text = f"there are {len(gpus)} GPUs, but torch was built without CUDA"
        yield Finding("gpu", "problem", text, "install a CUDA build of torch between 2.11 and 2.13")
    elif release(driver) < release(OLDEST_DRIVER.get(int(cuda.split(".")[0]), "0")):
        oldest = OLDEST_DRIVER[int(cuda.split(".")[0])]
        text = f"driver {driver} is too old for torch's CUDA {cuda}"
        yield Finding("gpu", "problem", text, f"install NVIDIA driver {oldest} or newer, or a torch for an older CUDA")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
