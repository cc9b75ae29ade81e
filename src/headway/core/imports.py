"""Objects that settings name by a path: `module:name` or `file.py:name`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.core.errors import HeadwayError, UsageError


def load_object(path: str, what: str) -> Any:
    """Import the class or function at `module:name` or `file.py:name`; modules in the current folder are found, too.

    `what` names the setting in errors. Raises UsageError that says what to write instead.
    """
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise UsageError(f'{what} "{path}" could not be imported: write module:name or file.py:name')
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    except HeadwayError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        raise UsageError(f'{what} "{path}" could not be imported: {reason}') from error
    if not hasattr(module, name):
        raise UsageError(f'{what} "{path}": {place} has no class or function {name}')
    found = getattr(module, name)
    if not callable(found):
        raise UsageError(f'{what} "{path}" is a {type(found).__name__}, not a class or function')
    return found


def absolute_path(path: str) -> str:
    """Write out the folder in `file.py:name`, so that it holds from anywhere; `module:name` stays as it is."""
    place, _, name = path.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{name}" if place.endswith(".py") else path


def _load_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:  # console scripts do not have the current folder on their path
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"headway_file_{path.stem}_{abs(hash(str(path))):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return module
