"""Environments by name: bundled, installed (entry points), an import path, or a file."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from headway.base.errors import HeadwayError, UsageError
from headway.base.imports import check_call, check_object, installed, load_object
from headway.base.suggestions import did_you_mean, nearest
from headway.envs.base import Environment
from headway.envs.bundled import ENVIRONMENTS
from headway.envs.packages.folder import GROUP


def known_environments() -> dict[str, str]:
    """Names to import paths. A bundled name wins over an installed one, so that examples mean the same everywhere."""
    return installed(GROUP) | ENVIRONMENTS


def load_environment(id: str, args: dict[str, Any] | None = None) -> Environment:
    """Build the environment `id` with keyword arguments. Raises HeadwayError with what to do about it."""
    factory = find_factory(id)
    check_call(factory, id, "environment", args or {})
    try:
        environment = factory(**(args or {}))
    except HeadwayError:
        raise
    except Exception as error:
        given = ", ".join(f"{key} = {value!r}" for key, value in (args or {}).items())
        built = f'environment "{id}" could not be built' + (f" with {given}" if given else "")
        raise HeadwayError(f"{built}: {type(error).__name__}: {error}") from error
    if not isinstance(environment, Environment):
        raise UsageError(f'environment "{id}" is a {type(environment).__name__}, not a headway Environment')
    return environment


def find_factory(id: str) -> Callable[..., object]:
    """The class or function that builds the environment `id`. Raises HeadwayError with what to do about it."""
    return load_object(_import_path(id), "environment")  # type: ignore[no-any-return]  # callable, checked there


def top_module(id: str, args: Mapping[str, Any]) -> str | None:
    """Return the top-level module that an environment comes from, without importing it; None where it is a file."""
    if id == "verifiers" and isinstance(taskset := args.get("taskset"), str):
        return taskset.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    place = _import_path(id).rpartition(":")[0]
    return None if place.endswith(".py") else place.partition(".")[0]


def environment_modules(id: str, environment: Environment) -> list[str]:
    """Names of the modules that an environment was built by: the factory's, which may be another's, and its own."""
    names = [getattr(find_factory(id), "__module__", None), *environment.modules()]
    return [name for name in dict.fromkeys(names) if name in sys.modules]


def check_environment(id: str) -> None:
    """Raise UsageError where there certainly is no environment `id`, without running its code."""
    check_object(_import_path(id), "environment")


def _import_path(id: str) -> str:
    if ":" in id:
        return id
    known = known_environments()
    if id.endswith(".py"):
        raise UsageError(f'environment "{id}" is a file: add the name of the class, as in {id}:Name')
    if id not in known:
        hint = did_you_mean(nearest(id, known), quote='"')
        names = ", ".join(sorted(known)) or "none"
        raise UsageError(f'no environment is called "{id}"{hint} (known: {names}; or module:Name, path.py:Name)')
    return known[id]
