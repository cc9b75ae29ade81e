"""Command-line arguments as layers: files named after `@`, and one layer of flags above them all."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.base.errors import UsageError
from headway.base.suggestions import did_you_mean, nearest
from headway.config.renamed import present_name
from headway.config.schema import Kind, is_none_text
from headway.config.tree import Tree, put, to_tree


@dataclass
class Arguments:
    """A parsed command line: files in order, and the flags as one tree."""

    files: list[Path] = field(default_factory=list)
    flags: Tree = field(default_factory=dict)
    dry_run: bool = False


def parse_arguments(kind: Kind, argv: Sequence[str], aliases: Mapping[str, str]) -> Arguments:
    """Read `@ file`, `--a.b value`, `--a.b=value`, `--flag`, `--no-flag` and `--dry-run`. Raises UsageError."""
    arguments = Arguments()
    words = list(argv)
    while words:
        word = words.pop(0)
        if word.startswith("@"):
            if not (name := word[1:] or (words.pop(0) if words else "")):
                raise UsageError("@ wants a file after it, as in `@ base.toml`")
            arguments.files.append(Path(name))
        elif word == "--dry-run":
            arguments.dry_run = True
        elif word.startswith("--") and len(word) > 2:
            path, value = _read_flag(kind, word, words, aliases)
            arguments.flags = put(arguments.flags, path, value)
        else:
            hint = f"; did you mean `@ {word}`?" if word.endswith(".toml") else ""
            raise UsageError(
                f"unexpected argument {word!r}: settings are files (`@ file.toml`) and flags (`--name value`){hint}"
            )
    return arguments


def _read_flag(kind: Kind, word: str, words: list[str], aliases: Mapping[str, str]) -> tuple[list[str], Tree]:
    name, equals, text = word.removeprefix("--").partition("=")
    flag = f"--{name}"
    path, target, negated = _find(kind, name, aliases)
    if negated:
        if equals:
            raise UsageError(f"{flag} takes no value; to set one, write --{'.'.join(path)}={text}")
        value: Any = False if target.is_bool else None
    elif equals:
        value = parse_value(target, text, flag)
    elif target.is_bool and (not words or words[0].lower() not in ("true", "false")):
        value = True
    elif target.is_settings and (not words or words[0].startswith(("--", "@"))):
        value = {}
    elif not words or (words[0].startswith("--") and len(words[0]) > 2):
        raise UsageError(f"{flag} wants a value after it")
    else:
        value = parse_value(target, words.pop(0), flag)
    return path, to_tree(value, flag)


def _find(kind: Kind, name: str, aliases: Mapping[str, str]) -> tuple[list[str], Kind, bool]:
    """Find the path and kind of a flag, and whether it is a `--no-` one. Raises UsageError for unknown names."""
    negated = False
    found = locate(kind, aliases.get(name, name))
    if found is None and name.startswith("no-"):
        positive = name.removeprefix("no-")
        found = locate(kind, aliases.get(positive, positive))
        negated = found is not None and (found[1].is_bool or found[1].optional)
        found = found if negated else None
    if found is None and name == "help":
        raise UsageError("--help comes right after the command, as in `headway rl --help`")
    if found is None and (present := present_name(name.replace("-", "_"))):
        raise UsageError(f"--{name}: this setting is now called --{present}")
    if found is None:
        near = suggestion(kind, name, "--", (*aliases, "dry-run"))
        raise UsageError(f"--{name}: no such setting{near}")
    return *found, negated


def locate(kind: Kind, name: str) -> tuple[list[str], Kind] | None:
    """Find the path and kind of a dotted name, over all members of unions; None where there is none."""
    path: list[str] = []
    for key in name.split("."):
        if kind.is_settings:
            key = key.replace("-", "_")
            if key not in kind.fields():
                return None
        elif not (key.isdigit() if kind.is_list else kind.is_table or kind.annotation is Any):
            return None
        path.append(key)
        kind = kind.child(key)
    return path, kind


def suggestion(kind: Kind, name: str, prefix: str = "", extra: Sequence[str] = ()) -> str:
    """Return `; did you mean ...?` with the nearest known name, or nothing where none is near."""
    known = [*dotted_names(kind), *extra]
    key = name.rpartition(".")[2]
    same_key = [other for other in known if other.rpartition(".")[2] == key.replace("-", "_")]
    shortest = min(same_key, key=lambda other: other.count("."), default=None)
    near = nearest(name, known, cutoff=0.75) or shortest or nearest(name, known)
    return did_you_mean(near and prefix + near)


def dotted_names(kind: Kind, prefix: str = "") -> list[str]:
    """List every setting below `kind`; items of lists as index 0."""
    names: list[str] = []
    for key, item in kind.fields().items():
        names.append(prefix + key)
        below, step = (item.kind.item(), "0.") if item.kind.is_list else (item.kind, "")
        names += dotted_names(below, f"{prefix}{key}.{step}")
    return names


def parse_value(kind: Kind, text: str, flag: str) -> Any:
    """Parse a flag's text as a value of the kind: text where text is wanted, else TOML or JSON."""
    if kind.optional and is_none_text(text):
        return None
    if kind.is_text:
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    with suppress(ValueError):
        return json.loads(text)
    with suppress(ValueError):
        return tomllib.loads(f"value = {text}")["value"]
    if kind.is_list or kind.is_table or kind.is_settings:
        raise UsageError(f"{flag}: cannot read {text!r}; write a JSON or TOML literal, for example {_example(kind)}")
    return text


def _example(kind: Kind) -> str:
    if kind.is_list and kind.item().is_settings:
        first = next(iter(kind.item().fields()))
        return f"'[{{{first} = \"...\"}}]'"
    if kind.tags:
        return f"'{{type = \"{next(iter(kind.tags))}\"}}'"
    return '\'["a", "b"]\'' if kind.is_list else "'{key = \"value\"}'"
