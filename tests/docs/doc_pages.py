"""The pages of the documentation, and the code blocks and code spans in them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
SHELL = ("bash", "sh", "")
"""Languages of code blocks that hold commands."""
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """Code blocks of a page in any of the languages."""
    return [text for language, text in FENCE.findall(page.read_text()) if language in languages]


def spans(page: Path) -> list[str]:
    """Code spans of a page, outside of code blocks."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", page.read_text()))]


def commands(program: str, page: Path) -> list[tuple[str, ...]]:
    """Arguments of every command line of a program, in code blocks and code spans of a page."""
    return [tuple(words) for line in (*_lines(page), *spans(page)) for words in _split(line, program)]


def _lines(page: Path) -> Iterator[str]:
    for block in blocks(page, *SHELL):
        yield from block.replace("\\\n", " ").splitlines()


def _split(line: str, program: str) -> Iterator[list[str]]:
    """Split a line into commands of `program`, without variables set for it, comments, pipes and redirections."""
    if program not in line:
        return
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&>;")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quote that is not closed: prose
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if word and set(word) <= set("|&>;"):
            while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
                command.pop(0)
            if command and command[0] == program:
                yield command[1:]
            command = []
        else:
            command.append(word)
