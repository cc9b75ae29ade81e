"""The code speaks plainly: docstrings begin with a verb or a noun, and loggers carry the name of their module."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "headway"
OPENINGS = ("What", "Whether", "Of", "Where", "How", "Which", "Who", "Whose", "Why", "As")
"""A docstring that begins so describes its subject by a question, or not at all."""


def docstrings() -> Iterator[tuple[str, str]]:
    """Every docstring with its place."""
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{file.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}", text


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = list(docstrings())
    assert len(found) > 1000
    wrong = [f"{place}: {text.splitlines()[0]}" for place, text in found if re.match(r"\w*", text)[0] in OPENINGS]
    assert not wrong, "\n".join(wrong)


def test_loggers_are_named_after_their_module() -> None:
    wrong = []
    for file in sorted(SOURCE.rglob("*.py")):
        for line in file.read_text().splitlines():
            if re.match(r"\w+ = logging\.getLogger\(", line) and line != "logger = logging.getLogger(__name__)":
                wrong.append(f"{file.relative_to(SOURCE)}: {line}")
    assert not wrong, "\n".join(wrong)
