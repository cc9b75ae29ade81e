"""Kinds of sandboxes by name, and the one that a machine gets by default."""

from collections.abc import Callable

from headway.base.imports import load_object
from headway.sandboxes.backend import Backend
from headway.sandboxes.sandbox import SandboxUnavailableError

_HERE = "headway.sandboxes"
# Paths, not classes: a kind is imported when it is used.
_LOCAL = {
    "bubblewrap": f"{_HERE}.local.bubblewrap:Bubblewrap",
    "gvisor": f"{_HERE}.local.gvisor:Gvisor",
    "container": f"{_HERE}.local.container:Containers",
    "process": f"{_HERE}.local.process:Processes",
}
_ELSEWHERE = {
    "host": f"{_HERE}.remote.client:HostBackend",
    "e2b": f"{_HERE}.remote.e2b:E2b",
    "daytona": f"{_HERE}.remote.daytona:Daytona",
    "prime": f"{_HERE}.remote.prime:Prime",
    "modal": f"{_HERE}.remote.modal:Modal",
}
_PATHS = _LOCAL | _ELSEWHERE


def backend_class(kind: str) -> type[Backend]:
    """Find the back end for `kind`; "auto" is bubblewrap. What follows a colon is the back end's own.

    Raises SandboxUnavailableError, with what to install, where this machine can't run it. "auto" never means `process`.
    """
    name = kind.partition(":")[0]
    if name == "auto":
        name = "bubblewrap"
    if name not in _PATHS:
        raise SandboxUnavailableError(f'no sandbox is called "{name}" (known: auto, {", ".join(_PATHS)})')
    found: type[Backend] = load_object(_PATHS[name], "sandbox")
    found.check()
    return found


def make_backend(kind: str) -> Backend:
    """Make the back end for `kind`, such as "gvisor" or "container:python:3.12-slim"."""
    found = backend_class(kind)
    name, _, argument = kind.partition(":")
    if bool(argument) != bool(found.takes):
        problem = f"needs {found.takes}" if found.takes else f'takes nothing after its name (got "{argument}")'
        raise SandboxUnavailableError(f'a sandbox of kind "{name}" {problem}')
    make: Callable[..., Backend] = found
    return make(argument) if argument else make()


def available_kinds() -> dict[str, str]:
    """Every kind that runs on one's own machine, with "" where this one can run it and else what to install."""
    problems = {}
    for kind in _LOCAL:
        try:
            backend_class(kind)
            problems[kind] = ""
        except SandboxUnavailableError as unavailable:
            problems[kind] = str(unavailable)
    return problems
