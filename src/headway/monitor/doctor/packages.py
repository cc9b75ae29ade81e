"""Installed packages, the pins they break, the engines they provide. Read from metadata: nothing is imported."""

import platform
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

import headway
from headway.base.extras import NAME, install_command, requirement_lines
from headway.monitor.doctor.finding import Finding
from headway.monitor.doctor.pins import Pin, parse_pin
from headway.monitor.doctor.vllm import check_vllm

TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
EXTRAS = {
    "verifiers": "environments written for verifiers",
    "environments": "reasoning-gym and textarena tasks",
    "plot": "reward curves as images",
    "data": "Parquet files",
    "gguf": "GGUF checkpoints",
    "guided": "replies in JSON by the embedded engine",
    "tracking": "TensorBoard and W&B",
}


def check_packages() -> Iterator[Finding]:
    """Check Python, torch, pins, companions of torch, engines and extras."""
    yield Finding("python", "ok", f"Headway {headway.__version__} on Python {platform.python_version()}")
    yield _torch()
    yield from _pins()
    yield from _companions()
    yield from _engines()
    yield _extras()


@cache
def installed(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def torch_build() -> dict[str, str | None]:
    """Read how torch was built (`__version__`, `cuda`, `hip`) from its file, without importing it."""
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec else None
    record = Path(folders[0]) / "version.py" if folders else None
    if record is None or not record.is_file():
        return {}
    # Lines such as `__version__ = '2.13.0'` and `cuda: Optional[str] = None`.
    assigned = re.findall(r"^(\w+)(?::[^=]*)? = (?:'([^']*)'|None)", record.read_text(), re.MULTILINE)
    return {name: value or None for name, value in assigned}


def headway_pins() -> list[Pin]:
    """List Headway's requirements, extras included."""
    pins = (parse_pin(line, extra) for line, extra in requirement_lines())
    return [pin for pin in pins if pin is not None and pin.package != NAME]


def _torch() -> Finding:
    build = torch_build()
    if not build:
        return Finding("torch", "problem", "torch is not installed", "pip install torch==2.13.0")
    made_for = f"CUDA {build['cuda']}" if build.get("cuda") else "ROCm" if build.get("hip") else "CPU"
    return Finding("torch", "ok", f"torch {build['__version__']} for {made_for}")


def _pins() -> Iterator[Finding]:
    held = 0
    for pin in headway_pins():
        have = installed(pin.package)
        if have is None and pin.extra is None:
            yield Finding("pins", "problem", f"{pin.package} is missing", f"pip install '{pin}'")
        elif have is not None and not pin.allows(have):
            yield _broken(pin, have)
        else:
            held += have is not None
    yield Finding("pins", "ok", f"{held} requirements of installed packages hold")


def _broken(pin: Pin, have: str) -> Finding:
    if pin.extra is None:
        text = f"{pin.package} is {have}, but Headway needs {pin}"
        return Finding("pins", "problem", text, f"pip install '{pin}'")
    text = f"{pin.package} is {have}, but the extra {pin.extra} needs {pin}"
    return Finding("pins", "warning", text, f"if you use {pin.extra}: pip install '{pin}'")


def _companions() -> Iterator[Finding]:
    """Find companions that were built for another torch: with them importing transformers or vLLM fails."""
    torch = torch_build().get("__version__")
    for package in TORCH_COMPANIONS:
        have = installed(package)
        if have is None or torch is None:
            continue
        pins = [pin for line in requires(package) or [] if (pin := parse_pin(line)) and pin.package == "torch"]
        remedy = f"pip uninstall -y {package} (nothing here needs it)"
        if not all(pin.allows(torch) for pin in pins):
            text = f"{package} {have} was built for another torch than {torch}: importing transformers or vLLM fails"
            yield Finding(package, "problem", text, remedy)
        elif "+cpu" in torch and "+cpu" not in have:
            text = f"{package} {have} may not fit torch {torch}: then importing transformers or vLLM fails"
            yield Finding(package, "warning", text, f"if `python -c 'import {package}'` fails: {remedy}")


def _engines() -> Iterator[Finding]:
    yield Finding("engines", "ok", "embedded: part of Headway, CPU and CUDA")
    yield from check_vllm(installed, torch_build().get("__version__") or "")


def _extras() -> Finding:
    needs: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    for pin in headway_pins():
        if pin.extra in needs:
            needs[pin.extra].append(pin.package)
    missing = [extra for extra, packages in needs.items() if any(installed(package) is None for package in packages)]
    if not missing:
        return Finding("extras", "ok", ", ".join(EXTRAS))
    text = "; ".join(f"{extra} ({EXTRAS[extra]})" for extra in missing)
    return Finding("extras", "note", f"not installed: {text}", f"optional: {install_command(*missing)}")
