"""Installing a wheel without changing the version of anything else."""

import importlib
import tempfile
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from headway.base.errors import UsageError
from headway.envs.packages.pip import run_pip
from headway.envs.packages.wheel import Wheel


def install_wheel(wheel: Wheel) -> None:
    """Install a wheel and what it still needs, and change the version of nothing else.

    Raises UsageError where it needs another version of a package that is here, or would overwrite another's modules.
    """
    _refuse_taken_modules(wheel)
    missing = _missing(wheel)
    if missing:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write("\n".join(f"{name}=={found}" for name, found in _installed().items()))
            constraints.flush()
            run_pip("install", "--constraint", constraints.name, *map(str, missing))
    run_pip("install", "--no-deps", "--no-index", "--force-reinstall", str(wheel.file))
    importlib.invalidate_caches()


def _installed() -> dict[str, str]:
    """Names and versions of all that is installed; the first of a name is the one that Python imports."""
    found: dict[str, str] = {}
    for one in distributions():
        try:
            found.setdefault(canonicalize_name(one.metadata["Name"]), str(Version(one.version)))
        except (InvalidVersion, TypeError, AttributeError):  # leftovers of a broken installation
            continue
    return found


def _missing(wheel: Wheel) -> list[Requirement]:
    missing = []
    for requirement in wheel.requires:
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            missing.append(requirement)
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            raise UsageError(
                f"{wheel.name} {wheel.version} needs {requirement}, and {requirement.name} {found} is installed; "
                "nothing was changed. Install that version yourself if everything else allows it"
            )
    return missing


def _refuse_taken_modules(wheel: Wheel) -> None:
    """Raise UsageError where a module of the wheel is there already and came with another package."""
    try:
        version(wheel.name)
    except PackageNotFoundError:
        here = str(Path.cwd())
        for module in wheel.modules:
            spec = find_spec(module)
            if spec is not None and here not in str(spec.origin or spec.submodule_search_locations):
                raise UsageError(
                    f"{wheel.name} {wheel.version} would install the module {module}, which another package has already"
                ) from None
