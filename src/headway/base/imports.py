"""Objects that settings name: by a path, `module:name` or `file.py:name`, or as an installed package calls them."""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.base.errors import HeadwayError, UsageError
from headway.base.suggestions import did_you_mean, nearest


def load_object(path: str, what: str, group: str | None = None) -> Any:
    """Import the class or function at `module:name` or `file.py:name`; modules in the current folder are found, too.

    With a `group`, a name without a colon is one that an installed package gave it (an entry point of that group).
    `what` names the setting in errors. Raises UsageError that says what to write instead.
    """
    if group is not None and ":" not in path:
        path = _installed_path(path, what, group)
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


def make_object(path: str, args: Mapping[str, Any], what: str, group: str | None = None) -> Any:
    """Call the class or function that `load_object` finds. Arguments that it does not take are a UsageError."""
    factory = load_object(path, what, group)
    check_call(factory, path, what, args)
    return factory(**args)


def check_call(
    function: Callable[..., object], path: str, what: str, args: Mapping[str, Any], given: Sequence[str] = ()
) -> None:
    """Raise UsageError where `function` cannot be called with values for `given`, in this order, and with `args`."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without one
        return
    try:
        signature.bind(*given, **args)
    except TypeError as error:
        names = [*given, *sorted(args)]
        signature = signature.replace(return_annotation=signature.empty)
        raise UsageError(f'{what} "{path}" takes {signature} and is called with {names}: {error}') from error


def installed(group: str) -> dict[str, str]:
    """Return what installed packages bring for a group of entry points: names to import paths."""
    return {point.name: point.value for point in entry_points(group=group)}


def _installed_path(name: str, what: str, group: str) -> str:
    known = installed(group)
    if name in known:
        return known[name]
    hint = did_you_mean(nearest(name, known), quote='"')
    names = f"installed: {', '.join(sorted(known))}" if known else f"no installed package has an entry point in {group}"
    raise UsageError(f'{what} "{name}" is not known{hint} ({names}); or write module:name or file.py:name')


def check_object(path: str, what: str) -> None:
    """Raise UsageError where `load_object` certainly would, without running any code: no such file, module or name."""
    place, _, name = path.rpartition(":")
    if not place or not name:
        raise UsageError(f'{what} "{path}" could not be imported: write module:name or file.py:name')
    if not place.endswith(".py"):
        _search_here()
        if importlib.util.find_spec(place.partition(".")[0]) is None:
            raise UsageError(f'{what} "{path}" could not be imported: there is no module {place.partition(".")[0]}')
        return
    file = Path(place).expanduser()
    if not file.is_file():
        raise UsageError(f'{what} "{path}" could not be imported: there is no file {file.absolute()}')
    try:
        names = _names_in(ast.parse(file.read_bytes()))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f'{what} "{path}" could not be imported: {type(error).__name__}: {error}') from None
    if name not in names and "*" not in names:
        raise UsageError(f'{what} "{path}": {place} has no class or function {name}')


def absolute_path(path: str) -> str:
    """Write out the folder in `file.py:name`, so that it holds from anywhere; `module:name` stays as it is."""
    place, _, name = path.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{name}" if place.endswith(".py") else path


def _names_in(tree: ast.Module) -> set[str]:
    """Collect the names that a file may define; also those that it imports, where `*` stands for any."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.alias():
                names.add(node.asname or node.name)
    return names


def _load_module(name: str) -> ModuleType:
    _search_here()
    return importlib.import_module(name)


def _search_here() -> None:
    here = str(Path.cwd())
    if here not in sys.path:  # console scripts do not have the current folder on their path
        sys.path.insert(0, here)


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    # A file is executed once, so that its classes are the same for everyone; again after it was edited.
    name = f"headway_file_{path.stem}_{abs(hash((str(path), path.stat().st_mtime_ns))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
