"""The source of a class as a module of its own, so that other processes can import what a notebook's cell defined.

Nothing is pickled: the module holds the class as it was written, and imports or repeats what it uses by name.
"""

import ast
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from headway.base.errors import UsageError

PLAIN = (str, bytes, int, float, bool, type(None))


def module_source(*classes: type) -> str:
    """Return the text of a module that defines `classes`, after all that they use of the module they were written in.

    Imports, functions, classes and plain constants are followed by name. Raises UsageError, which says what to do,
    where the source of something is unknown, or something is used that cannot be written down.
    """
    writer = _ModuleWriter()
    for cls in classes:
        writer.add(cls.__name__, cls, sys.modules.get(cls.__module__))
    return "\n".join([*sorted(writer.imports), "", *writer.definitions])


class _ModuleWriter:
    """Collects imports and definitions, each after those it needs."""

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.definitions: list[str] = []
        self._seen: dict[str, Any] = {}

    def add(self, name: str, value: Any, home: ModuleType | None) -> None:
        """Write what `name` means in the module `home`."""
        if name in self._seen:
            if self._seen[name] is not value:
                raise UsageError(f"two different things are called {name}; give one of them another name")
            return
        self._seen[name] = value
        if isinstance(value, ModuleType):
            self.imports.add(f"import {value.__name__} as {name}")
        elif isinstance(value, type | FunctionType) and home is not None and value.__module__ == home.__name__:
            self._define(name, value, home)
        elif (path := _import_path(value)) is not None:
            self.imports.add(f"from {path[0]} import {path[1]} as {name}")
        elif _is_plain(value):
            self.definitions.append(f"{name} = {value!r}\n")
        else:
            raise UsageError(
                f"{name} is a {type(value).__name__}, which cannot be sent to another process; "
                "make it inside the class, for example in its __init__, or write the class into a file"
            )

    def _define(self, name: str, value: type | FunctionType, home: ModuleType) -> None:
        source = source_of(value)
        for used in _used_names(source):
            # Other names are arguments, local variables, built in, or mistakes that the worker reports.
            if used in vars(home) and vars(home)[used] is not value:
                self.add(used, vars(home)[used], home)
        self.definitions.append(f"\n{source}\n")
        if value.__name__ != name:
            self.definitions.append(f"{name} = {value.__name__}\n")


def source_of(value: type | FunctionType) -> str:
    """Return the source of a class or function, also of one from a notebook's cell. Raises UsageError if unknown."""
    for code in _codes(value):
        lines = linecache.getlines(code.co_filename)
        if not lines:
            continue
        for node in ast.walk(ast.parse("".join(lines))):
            kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            if isinstance(node, kinds) and node.name == value.__name__ and _contains(node, code):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip()
    try:
        return textwrap.dedent(inspect.getsource(value)).rstrip()
    except (OSError, TypeError):
        raise UsageError(
            f"the source of {value.__name__} is unknown, so other processes cannot be given it; "
            "write it into a file and name it as file.py:NAME"
        ) from None


def _codes(value: type | FunctionType) -> Iterator[CodeType]:
    """Yield code objects that were compiled with it, which know their file and line."""
    if isinstance(value, FunctionType):
        yield value.__code__
        return
    for member in vars(value).values():
        function = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", member)) or member)
        if isinstance(function, FunctionType) and function.__qualname__.startswith(f"{value.__qualname__}."):
            yield function.__code__


def _contains(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, code: CodeType) -> bool:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return first <= code.co_firstlineno <= (node.end_lineno or node.lineno)


def _used_names(source: str) -> list[str]:
    """Return every name that is read in a piece of source, annotations and decorators included, in order."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name))
    return list(dict.fromkeys(node.id for node in nodes if isinstance(node.ctx, ast.Load)))


def _import_path(value: Any) -> tuple[str, str] | None:
    """Return the module and the name by which another process imports the same thing; None where there is none."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not name.isidentifier() or module == "__main__":
        return None
    return (module, name) if getattr(sys.modules.get(module), name, None) is value else None


def _is_plain(value: Any) -> bool:
    """Tell whether the value is made of texts, numbers and containers of them, whose `repr` says all."""
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in PLAIN and value == value and value not in (float("inf"), float("-inf"))
