"""Environments by name: bundled, installed (entry points), an import path, or a file."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.core.errors import HeadwayError
from headway.envs.base import Environment

GROUP = "headway.environments"
"""Entry-point group of packages that bring environments: `name = "module:Name"`."""
BUNDLED = "headway.envs.bundled"
"""Its `ENVIRONMENTS` maps names to import paths."""


def known_environments() -> dict[str, str]:
    """Names to import paths. A bundled name wins over an installed one, so that examples mean the same everywhere."""
    installed = {point.name: point.value for point in entry_points(group=GROUP)}
    return installed | _bundled()


def load_environment(id: str, args: dict[str, Any] | None = None) -> Environment:
    """Build the environment `id` with keyword arguments. Raises HeadwayError with what to do about it."""
    factory = find_factory(id)
    try:
        environment = factory(**(args or {}))
    except HeadwayError:
        raise
    except Exception as error:
        raise HeadwayError(f'environment "{id}" could not be built: {type(error).__name__}: {error}') from error
    if not isinstance(environment, Environment):
        raise HeadwayError(f'environment "{id}" is a {type(environment).__name__}, not a headway Environment')
    return environment


def find_factory(id: str) -> Callable[..., object]:
    """The class or function that builds the environment `id`. Raises HeadwayError with what to do about it."""
    if ":" not in id:
        known = known_environments()
        if id not in known:
            near = difflib.get_close_matches(id, known, n=1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            names = ", ".join(sorted(known)) or "none"
            raise HeadwayError(f'no environment is called "{id}"{hint} (known: {names}; or module:Name, path.py:Name)')
        id = known[id]
    place, _, name = id.rpartition(":")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    except HeadwayError:
        raise
    except Exception as error:
        raise HeadwayError(f'environment "{id}" could not be imported: {type(error).__name__}: {error}') from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise HeadwayError(f'environment "{id}": {place} has no class or function {name}')
    return factory  # type: ignore[no-any-return]  # callable() narrows Any to nothing better


def _bundled() -> dict[str, str]:
    try:
        return dict(importlib.import_module(BUNDLED).ENVIRONMENTS)
    except ModuleNotFoundError as error:
        if error.name != BUNDLED:
            raise
        return {}


def _load_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:  # console scripts do not have the current folder on their path
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise HeadwayError(f"there is no file {path}")
    name = f"headway_file_{path.stem}_{abs(hash(str(path))):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
