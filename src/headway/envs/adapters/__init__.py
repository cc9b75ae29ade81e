"""Environments of other packages, each behind one file."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from headway.base.errors import UsageError
from headway.base.extras import install_command


def require(module: str, package: str, extra: str, exactly: str | None = None) -> ModuleType:
    """Import `module`. Raises UsageError naming the extra where `package` is missing, or not the version `exactly`."""
    try:
        found = version(package)
    except PackageNotFoundError:
        raise UsageError(f"{package} is not installed; {install_command(extra)}") from None
    if exactly is not None and found != exactly:
        raise UsageError(
            f"{package} {found} is installed, and this adapter knows {exactly}; pip install '{package}=={exactly}'"
        )
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{package} cannot be imported ({error}); {install_command(extra)}") from error
