"""The reference of all settings, as Markdown, from the settings themselves."""

import ast
import inspect
import sys
import types
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from headway.config.base import Settings
from headway.config.commands import COMMAND_SETTINGS
from headway.config.schema import Kind
from headway.config.toml import entry

INTRODUCTION = """\
# Settings

Every setting, its type, its default and what it means, as `headway config docs` prints them.
[Configuration](configuration.md) says how files and flags set them.

A section whose name is followed by a type is one of several that its `type` setting chooses among. `N` is the index of
an item in a list. `none` stands for no value; a setting without a default must be given.
"""

WORDS = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    Any: "anything",
    NoneType: "none",
}
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

Documented = dict[type[Settings], str]
"""The section in which each class of settings is described."""


def reference() -> str:
    """Write the whole page."""
    return "\n".join([INTRODUCTION, _commands(), "## Top level\n", *_section(_top_level(), "", {})])


def _commands() -> str:
    rows = [
        f"| `headway {command}` | {', '.join(f'`{name}`' for name in sorted(kind.model_fields))} |"
        for command, kind in COMMAND_SETTINGS.items()
    ]
    return "\n".join(["## Commands and what they read", "", "| command | settings |", "|---|---|", *rows, ""])


def _top_level() -> dict[str, FieldInfo]:
    return {name: info for kind in COMMAND_SETTINGS.values() for name, info in _described(kind).items()}


def _described(model: type[Settings]) -> dict[str, FieldInfo]:
    """The settings of a class, each described by the docstring below it."""
    texts: dict[str, str | None] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, Settings):
            texts |= _docstrings(base.__module__, base.__name__)
    fields = {name: copy(info) for name, info in model.model_fields.items()}
    for name, info in fields.items():
        info.description = texts.get(name)
    return fields


@cache
def _docstrings(module: str, name: str) -> dict[str, str | None]:
    """The docstrings below the fields of a class, as far as there are any."""
    body = next(node.body for node in _statements(module) if isinstance(node, ast.ClassDef) and node.name == name)
    found: dict[str, str | None] = {}
    for node, below in pairwise([*body, ast.Pass()]):
        match node, below:
            case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                found[field] = inspect.cleandoc(text)
            case ast.AnnAssign(target=ast.Name(id=field)), _:
                found[field] = None
    return found


@cache
def _statements(module: str) -> list[ast.stmt]:
    return ast.parse(inspect.getsource(sys.modules[module])).body


def _section(fields: dict[str, FieldInfo], prefix: str, documented: Documented) -> Iterator[str]:
    """Write a table of settings, then a section for each class below them that was not described before."""
    below = {name: [model for model in _models(info) if model not in documented] for name, info in fields.items()}
    for name, models in below.items():
        documented |= dict.fromkeys(models, _place(prefix + name, fields[name]))
    rows = [_row(prefix + name, info, documented) for name, info in fields.items()]
    yield "\n".join(["| setting | type | default | meaning |", "|---|---|---|---|", *rows, ""])
    for name, models in below.items():
        for model in models:
            yield from _model_section(model, _place(prefix + name, fields[name]), documented)


def _model_section(model: type[Settings], place: str, documented: Documented) -> Iterator[str]:
    tag = model.model_fields.get("type")
    yield f"## `{place}`" + (f' with `type = "{tag.default}"`\n' if tag else "\n")
    if doc := (model.__doc__ or "").strip():
        yield f"{doc}\n"
    bases = [base for base in model.__mro__[1:] if base in documented]
    if bases:
        yield f"All of `{documented[bases[0]]}`, and:\n"
    inherited = {"type", *bases[0].model_fields} if bases else {"type"}
    fields = {name: info for name, info in _described(model).items() if name not in inherited}
    if fields:
        yield from _section(fields, f"{place}.", documented)


def _models(info: FieldInfo) -> tuple[type[Settings], ...]:
    kind = Kind(info.annotation)
    return kind.item().models if kind.is_list else kind.models


def _place(name: str, info: FieldInfo) -> str:
    return f"{name}.N" if Kind(info.annotation).is_list else name


def _row(name: str, info: FieldInfo, documented: Documented) -> str:
    if models := _models(info):
        kind = _section_text(name, info, documented[models[0]])
    else:
        kind = type_text(info.annotation, info.metadata)
    cells = (f"`{name}`", kind, _default(info), info.description or "")
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _section_text(name: str, info: FieldInfo, place: str) -> str:
    many = "list of sections" if Kind(info.annotation).is_list else "section"
    text = many if place == _place(name, info) else f"{many} as `{place}`"
    return text + (" or none" if Kind(info.annotation).optional else "")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return ""
    value = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Settings):
        return f'`type = "{value.__dict__["type"]}"`' if isinstance(value.__dict__.get("type"), str) else ""
    if isinstance(value, dict):
        return "`{" + ", ".join(entry(key, item) for key, item in value.items()) + "}`"
    return "none" if value is None else f"`{entry('default', value).removeprefix('default = ')}`"


def type_text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe a type in words that a user of TOML knows, with its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(argument, metadata) for argument in arguments))
    if origin is Literal:
        return ", ".join(f'`"{choice}"`' for choice in arguments)
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)} × {type_text(arguments[0])}"
    if origin is dict:
        return f"table of {type_text(arguments[1])}"
    return WORDS[annotation] + (_bounds(metadata) if annotation in (int, float) else "")


def _bounds(metadata: Sequence[Any]) -> str:
    found = [f"{sign} {getattr(item, key)}" for item in metadata for key, sign in SIGNS.items() if hasattr(item, key)]
    return " " + ", ".join(found) if found else ""
