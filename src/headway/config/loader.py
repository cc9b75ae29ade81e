"""Settings from TOML layers and flags: later wins, every value remembers its origin, errors say where and what."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headway.base.errors import UsageError
from headway.base.files import write_atomic
from headway.config.base import Settings
from headway.config.flags import parse_arguments, suggestion
from headway.config.renamed import present_name, present_value
from headway.config.schema import Kind
from headway.config.toml import to_toml
from headway.config.tree import DEFAULT, Leaf, Tree, defaults, leaves, merge, plain, to_tree

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Resolved(Generic[S]):
    """Settings after all layers. `origins` names the file or flag of every setting that is not a default, `files` all
    files that were read."""

    settings: S
    origins: dict[str, str]
    dry_run: bool = False
    files: tuple[Path, ...] = ()

    def origin(self, name: str) -> str:
        """Return the file or flag that set a setting; of a list changed item by item, that of its first item."""
        below = (origin for path, origin in self.origins.items() if path.startswith(f"{name}."))
        return self.origins.get(name) or next(below, DEFAULT)


def load_settings(
    kind: type[S], argv: Sequence[str], *, aliases: Mapping[str, str] = {}, changes: Mapping[str, Any] = {}
) -> Resolved[S]:
    """Resolve `["@", "a.toml", "--trainer.optim.lr", "1e-5", ...]` against a settings class.

    Files lie over the defaults in the order they are named, flags lie over all files, and `changes`, which a program
    gives, over those. `aliases` maps short flags to dotted names. Raises UsageError, with nothing written, on anything
    that cannot be understood.
    """
    schema = Kind(kind)
    arguments = parse_arguments(schema, argv, aliases)
    tree: Tree = defaults(schema)
    given = {key: to_tree(value, "argument") for key, value in changes.items()}
    for layer in (*map(read_layer, arguments.files), arguments.flags, given):
        tree = merge(tree, layer, schema)
    unknown: list[str] = []
    tree = _known(tree, schema, unknown)
    found = {".".join(path): leaf.origin for path, leaf in leaves(tree)}
    try:
        settings = kind.model_validate(plain(tree, schema), strict=True)
    except ValidationError as error:
        # What is missing beside a key that nobody knows is most likely that key, misspelt.
        errors = [details for details in error.errors() if not (unknown and details["type"] == "missing")]
        wrong = [_explain(details, tree, schema) for details in errors]
        raise UsageError("\n".join([*unknown, *wrong])) from None
    if unknown:
        raise UsageError("\n".join(unknown))
    origins = {name: origin for name, origin in found.items() if origin != DEFAULT}
    return Resolved(settings, origins, arguments.dry_run, tuple(arguments.files))


def read_layer(path: Path) -> dict[str, Tree]:
    """Read one TOML file as a layer. Raises UsageError when it is missing, unreadable or broken."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; settings files are TOML files named after `@`") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: is not valid TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"{path}: is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{str(path)!r} cannot be a file: {error}") from None
    return {key: to_tree(value, str(path)) for key, value in content.items()}


def write_settings(settings: Settings, path: Path) -> None:
    """Write resolved settings as TOML that loads to equal settings. The file appears whole or not at all."""
    write_atomic(path, to_toml(settings))


def _known(tree: Tree, kind: Kind, unknown: list[str], path: tuple[str, ...] = ()) -> Tree:
    """Return the tree without keys that are no settings, and add a line about each of those to `unknown`."""
    if isinstance(tree, list):
        return [_known(item, kind.item(), unknown, (*path, str(index))) for index, item in enumerate(tree)]
    if not isinstance(tree, dict) or not kind.is_settings:
        return tree
    tag = tree.get("type")
    member = kind.tagged(tag.value if isinstance(tag, Leaf) else None)
    known: dict[str, Tree] = {}
    for key, below in tree.items():
        if key in member.fields():
            known[key] = _known(below, member.child(key), unknown, (*path, key))
        else:
            unknown.append(_unknown(key, below, kind, member, path))
    return known


def _unknown(key: str, below: Tree, kind: Kind, member: Kind, path: tuple[str, ...]) -> str:
    origin = next((f"{leaf.origin}: " for _, leaf in leaves(below)), "")
    name = ".".join((*path, key))
    if present := present_name(name):
        return f"{origin}{name} is now called {present}"
    owners = [tag for tag, model in kind.tags.items() if key in model.model_fields]
    if owners and member is not kind:
        chosen = member.models[0].model_fields["type"].default
        where = ".".join((*path, "type"))
        return f"{origin}{name} belongs to {where} = {_either(owners)}, but the type is {chosen!r}; change one of them"
    return f"{origin}{name} is not a setting{suggestion(member, key)}"


def _either(names: list[str]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def _explain(details: ErrorDetails, tree: Tree, kind: Kind) -> str:
    """Describe a validation error in one line: origin, setting, what is wrong, what was given."""
    path, place = _walk(details["loc"], kind)
    given = details["input"]
    match details["type"]:
        case "broken_rule":
            path += details["ctx"]["field"].split(".")
            return f"{_subject(path, tree)} {details['ctx']['reason']}"
        case "missing":
            return f"{_subject(path, tree)} is missing; set it in a file or with --{'.'.join(path)}"
        case "union_tag_not_found" | "union_tag_invalid":
            tag = given.get("type") if isinstance(given, dict) else None
            path = [*path, "type"]
            if present := present_value(".".join(path), tag):
                return f'{_subject(path, tree)} "{tag}" is now called "{present}"'
            wanted = f"{_subject(path, tree)} must be one of {', '.join(place.tags)}"
            return wanted if tag is None else f"{wanted} (got {tag!r})"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{_subject(path, tree)} must be a table (got {_short(given)})"
        case "list_type" if place.item().is_settings:
            return f"{_subject(path, tree)} must be a list of tables, [[{'.'.join(path)}]] (got {_short(given)})"
    if present := present_value(".".join(path), given):
        return f'{_subject(path, tree)} "{given}" is now called "{present}"'
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{_subject(path, tree)} {message} (got {_short(given)})"


def _walk(location: tuple[int | str, ...], kind: Kind) -> tuple[list[str], Kind]:
    """Turn a validation error's place into a dotted path, without the names of union members."""
    path: list[str] = []
    for step in map(str, location):
        if step in kind.tags:
            kind = kind.tagged(step)
            continue
        kind = kind.child(step)
        path.append(step)
    return path, kind


def _subject(path: list[str], tree: Tree) -> str:
    """Name a setting, after the file or flag that set it or the nearest section above it."""
    node: Tree = tree
    for step in path:
        below = _below(node, step)
        if below is None:
            break
        node = below
    name = ".".join(path)
    origin = next((leaf.origin for _, leaf in reversed(list(leaves(node))) if leaf.origin != DEFAULT), None)
    return origin if origin == f"--{name}" else f"{origin}: {name}" if origin else name


def _below(node: Tree, step: str) -> Tree | None:
    if isinstance(node, dict):
        return node.get(step)
    if isinstance(node, list) and step.isdigit() and int(step) < len(node):
        return node[int(step)]
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
