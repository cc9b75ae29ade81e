"""The evaluations of a run: its rounds, and the tasks of each with what was said and how it was scored."""

import re
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from headway.monitor.tail import LONGEST_LINE

ROUND = re.compile(r"^step_(?P<step>\d{6,9})_(?P<env>[A-Za-z0-9_.-]+)\.jsonl$")


class TaskScores(msgspec.Struct):
    """One line of a round: the samples of one task. `messages` is the conversation of the first of them."""

    task: str = ""
    rewards: list[float] = msgspec.field(default_factory=list)
    passed: list[bool] = msgspec.field(default_factory=list)
    errors: list[str] = msgspec.field(default_factory=list)
    replies: list[str] = msgspec.field(default_factory=list)
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)


def rounds(folder: Path) -> list[dict[str, Any]]:
    """List name, step and environment of every round, newest first."""
    found = []
    for path in _files(folder):
        if (match := ROUND.match(path.name)) is not None:
            found.append({"name": path.name, "step": int(match["step"]), "env": match["env"]})
    return sorted(found, key=lambda one: (-one["step"], one["env"]))


def round_page(folder: Path, name: str, offset: int, limit: int) -> dict[str, Any]:
    """Read tasks `offset .. offset + limit` of a round; `more` tells whether there are others behind them.

    Raises KeyError when there is no such round. Lines that are damaged are left out.
    """
    if name not in {path.name for path in _files(folder)}:
        raise KeyError(name)
    decode = msgspec.json.Decoder(TaskScores).decode
    tasks = []
    with (folder / name).open("rb") as file:
        lines = iter(lambda: file.readline(LONGEST_LINE), b"")
        for line in islice(lines, offset, offset + limit):
            try:
                tasks.append(msgspec.to_builtins(decode(line)))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
        more = next(lines, None) is not None
    return {"name": name, "offset": offset, "tasks": tasks, "more": more}


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if ROUND.match(path.name) and not path.is_symlink()]
    except OSError:
        return []
