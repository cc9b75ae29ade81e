"""Unified diffs between versions of files: made, and applied strictly."""

import difflib
import re
from collections.abc import Iterator, Mapping

from headway.base.errors import UsageError

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file"
_NOTHING = "/dev/null"


def make_patch(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """A unified diff, as git writes it; a file that one side lacks is created or deleted."""
    text = ""
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        names = f"a/{path}" if old is not None else _NOTHING, f"b/{path}" if new is not None else _NOTHING
        lines = difflib.unified_diff(_lines(old or ""), _lines(new or ""), *names)
        text += f"diff --git a/{path} b/{path}\n"
        text += "".join(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}\n" for line in lines)
    return text


def apply_patch(files: Mapping[str, str], patch: str, *, reverse: bool = False) -> dict[str, str | None]:
    """The files that a patch changes, as they are after it; None for one that it deletes.

    Every line of context must be where the patch says. Raises UsageError where it is not.
    """
    changed: dict[str, str | None] = {}
    for old_name, new_name, hunks in _files_of(patch):
        if reverse:
            old_name, new_name = new_name, old_name
            hunks = [(new, old, [_turned(line) for line in lines]) for old, new, lines in hunks]
        path = (new_name if old_name == _NOTHING else old_name).partition("/")[2]
        if old_name != _NOTHING and path not in files:
            raise UsageError(f"the patch changes {path}, which is not there")
        text = _apply_hunks("" if old_name == _NOTHING else files[path], hunks, path)
        changed[path] = None if new_name == _NOTHING else text
    return changed


def touched(patch: str) -> set[str]:
    """Paths of the files that a patch changes, creates or deletes."""
    names = [name for old, new, _ in _files_of(patch) for name in (old, new)]
    return {name.partition("/")[2] for name in names if name != _NOTHING}


_Hunk = tuple[int, int, list[str]]


def _files_of(patch: str) -> Iterator[tuple[str, str, list[_Hunk]]]:
    lines = patch.split("\n")
    at = 0
    while at < len(lines):
        if not lines[at].startswith("--- ") or at + 1 >= len(lines) or not lines[at + 1].startswith("+++ "):
            at += 1
            continue
        names = [line[4:].split("\t")[0].strip() for line in lines[at : at + 2]]
        at += 2
        hunks: list[_Hunk] = []
        while at < len(lines) and (found := _HUNK.match(lines[at])):
            at, hunk = _read_hunk(lines, at + 1, found)
            hunks.append(hunk)
        yield names[0], names[1], hunks


def _read_hunk(lines: list[str], at: int, found: re.Match[str]) -> tuple[int, _Hunk]:
    old_left, new_left = (int(found[group]) if found[group] is not None else 1 for group in (2, 4))
    body: list[str] = []
    while old_left > 0 or new_left > 0:
        line = lines[at] if at < len(lines) else ""
        old_left -= line[:1] in (" ", "-", "")
        new_left -= line[:1] in (" ", "+", "")
        if min(old_left, new_left) < 0 or line[:1] not in (" ", "-", "+", ""):
            raise UsageError("the patch is cut off or damaged: a hunk has other lines than it says")
        body.append((line or " ") + "\n")
        at += 1
        if at < len(lines) and lines[at].startswith("\\"):
            body[-1] = body[-1][:-1]
            at += 1
    return at, (int(found[1]), int(found[3]), body)


def _apply_hunks(text: str, hunks: list[_Hunk], path: str) -> str:
    before, after, done = _lines(text), list[str](), 0
    for start, _, lines in hunks:
        old = [line[1:] for line in lines if line[0] in " -"]
        at = start - 1 if old else start
        if before[at : at + len(old)] != old or at < done:
            raise UsageError(f"the patch does not fit {path} at line {start}")
        after += before[done:at]
        after += [line[1:] for line in lines if line[0] in " +"]
        done = at + len(old)
    return "".join(after + before[done:])


def _turned(line: str) -> str:
    return {"-": "+", "+": "-"}.get(line[0], line[0]) + line[1:]


def _lines(text: str) -> list[str]:
    """Split at newlines only: `splitlines` would also split at form feeds and others."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
