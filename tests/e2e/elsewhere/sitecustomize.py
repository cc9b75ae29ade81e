"""Python as it is on systems other than Linux: what only Linux has is hidden from every process that has this folder
on its PYTHONPATH, and processes are started by `spawn`."""

import builtins
import ctypes
import io
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

MISSING_CALLS = ("posix_fallocate", "sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "sendfile")
MISSING_FOLDERS = ("/proc", "/dev/shm", "/sys")


def hide(module: Any, name: str) -> None:
    """Make a function of `module` fail for paths in folders that are not there. psutil asks the kernel elsewhere."""
    inner: Callable[..., Any] = getattr(module, name)

    def outer(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        place = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        caller = sys._getframe(1).f_globals.get("__name__", "")
        missing = any(place == folder or place.startswith(f"{folder}/") for folder in MISSING_FOLDERS)
        if missing and not caller.startswith("psutil"):
            raise FileNotFoundError(2, "No such file or directory", place)
        return inner(path, *args, **kwargs)

    setattr(module, name, outer)


for call in MISSING_CALLS:
    if hasattr(os, call):
        delattr(os, call)
shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]  # decided before the call was hidden
for function in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access", "mkdir"):
    hide(os, function)
hide(io, "open")
builtins.open = io.open

library_function = ctypes.CDLL.__getattr__


def find(library: ctypes.CDLL, name: str) -> Any:
    if name == "prctl":
        raise AttributeError(name)
    return library_function(library, name)


ctypes.CDLL.__getattr__ = find  # type: ignore[method-assign]
multiprocessing.set_start_method("spawn")
