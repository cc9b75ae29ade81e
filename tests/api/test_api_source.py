"""Classes of notebooks as modules of their own: what they use comes along, and what cannot is said."""

import linecache
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway.api.source import module_source
from headway.base.errors import UsageError
from headway.base.imports import load_object

IMPORTS = """
import math as m, threading
from collections import Counter
import headway
from headway import Task, reward
"""
HELPERS = """
VOWELS = {"a": 1.0, "e": [2, (3,)]}
LOCK = threading.Lock()

def share(text):
    return sum(VOWELS.get(sign, 0.0) for sign in helper(text))

def helper(text):
    return Counter(text)
"""
CLASS = """
unused = object()

@property
def decoy(self): ...

class Mine(headway.SingleTurn):
    '''My environment.'''

    limit: int = m.floor(2.5)

    def tasks(self):
        return [Task("a", {"word": "a"})]

    def prompt(self, task):
        return task.data["word"]

    @reward
    def vowels(self, answer):
        return share(answer)

class Locked(Mine):
    def prompt(self, task):
        with LOCK:
            return ""
"""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of a notebook after its cells ran, each cell compiled as a kernel does it."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    for number, cell in enumerate((IMPORTS, HELPERS, CLASS)):
        name = f"/tmp/ipykernel_1/{number}.py"
        monkeypatch.setitem(linecache.cache, name, (len(cell), None, cell.splitlines(keepends=True), name))
        exec(compile(cell, name, "exec"), vars(module))
    return vars(module)


def test_a_class_takes_along_what_it_uses_and_nothing_else(notebook: dict[str, Any], tmp_path: Path) -> None:
    source = module_source(notebook["Mine"])
    assert "unused" not in source and "LOCK" not in source and "decoy" not in source
    (tmp_path / "shipped.py").write_text(source)
    mine = load_object(f"{tmp_path}/shipped.py:Mine", "environment")()
    assert mine.limit == 2 and mine.tasks()[0].id == "a" and mine.vowels("a") == 1.0
    assert mine.__doc__ == "My environment."


def test_the_module_works_in_a_process_that_never_saw_the_notebook(notebook: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "shipped.py").write_text(module_source(notebook["Mine"]))
    program = "import shipped; print(shipped.Mine().vowels('a'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1.0"


def test_what_cannot_be_sent_is_named(notebook: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"LOCK is a lock, which cannot be sent.*__init__"):
        module_source(notebook["Locked"])


def test_a_class_without_source_is_said() -> None:
    made = type("Made", (), {"__module__": "__main__"})
    with pytest.raises(UsageError, match=r"source of Made is unknown.*file\.py:NAME"):
        module_source(made)


def test_import_headway_is_light() -> None:
    program = (
        "import sys, headway; assert not {'torch', 'pydantic', 'rich', 'numpy'} & set(sys.modules); "
        "assert 'rl' in dir(headway); headway.HeadwayError; "
        "from headway import nothing"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "cannot import name 'nothing'" in done.stderr and "AssertionError" not in done.stderr
