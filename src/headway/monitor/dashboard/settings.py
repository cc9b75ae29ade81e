"""The settings of a run, flat, each with its origin as far as the run's record tells."""

import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.core.runs import RunPaths
from headway.monitor.dashboard.summary import read_json

SHOWN = ("headway", "commit", "python", "torch", "vllm", "gpus", "host", "user", "started_at")
"""Fields of a run's record that the page shows beside its settings."""


def view_settings(paths: RunPaths) -> dict[str, Any]:
    """Read the newest command line, the files it named, and per settings file a list of name, value and origin.

    The origin is "flag" for what a command line of the run says, "default" for what equals it, and "file" for the rest.
    """
    record = read_json(paths.record)
    attempts = [one for one in record.get("attempts") or [] if isinstance(one, dict)] or [record]
    lines = [[word for word in one.get("argv") or [] if isinstance(word, str)] for one in attempts]
    argv = lines[-1]
    flags = {word[2:].partition("=")[0].replace("-", "_") for line in lines for word in line if word.startswith("--")}
    defaults = dict(flatten(_defaults(str(record.get("command")))))
    files = []
    for path in _toml_files(paths.config):
        try:
            tree = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            continue
        rows = [{"name": n, "value": v, "origin": _origin(n, v, flags, defaults)} for n, v in flatten(tree)]
        files.append({"name": path.name, "settings": rows})
    known = record | attempts[-1]
    shown = {key: known[key] for key in SHOWN if known.get(key)} | {"attempts": len(attempts)}
    named = [after for word, after in pairwise(argv) if word == "@"]
    return {"argv": argv, "files": files, "named": named, "record": shown}


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and plain values; entries of lists of tables get their number as a name."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list) and any(isinstance(entry, dict) for entry in tree):
        for number, entry in enumerate(tree):
            yield from flatten(entry, f"{prefix}.{number}")
    elif prefix:
        yield prefix, tree if isinstance(tree, str | int | float | bool | list) else str(tree)


def _toml_files(folder: Path) -> list[Path]:
    order = {"rl.toml": 0, "sft.toml": 0}
    files = [path for path in folder.glob("*.toml") if not path.is_symlink()]
    return sorted(files, key=lambda path: (order.get(path.name, 1), path.name))


def _origin(name: str, value: Any, flags: set[str], defaults: dict[str, Any]) -> str:
    if any(name == flag or name.startswith(f"{flag}.") for flag in flags):
        return "flag"
    return "default" if name in defaults and defaults[name] == value else "file"


def _defaults(command: str) -> dict[str, Any]:
    """Return the settings of a command without files and flags."""
    from headway.config.commands import COMMAND_SETTINGS

    kind = COMMAND_SETTINGS.get(command)
    return kind().model_dump(mode="json") if kind is not None else {}
