"""Extras are installed by the names of their packages, never by Headway's own, which the public index may not know."""

import ast
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from headway.base import extras

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Requirements as the metadata of an installed wheel have them; there is no project file."""
    lines: list[str] = []
    monkeypatch.setattr(extras, "__file__", "/nowhere/a/b/c.py")
    monkeypatch.setattr(extras, "requires", lambda name: lines)
    extras.requirement_lines.cache_clear()
    yield lines
    extras.requirement_lines.cache_clear()


def test_a_wheel_knows_the_packages_of_its_extras(lines: list[str]) -> None:
    lines += ["torch>=2.11", "six; python_version < '4'", "b==2; extra == 'one'", "c[x]>=1,<2; extra == 'two'"]
    lines += ["headway[two]; extra == 'one'"]
    assert extras.install_command("two") == "pip install 'c[x]<2,>=1'"
    assert extras.install_command("one") == "pip install b==2 'c[x]<2,>=1'"
    assert extras.install_command("two", "one", "two") == "pip install 'c[x]<2,>=1' b==2"


def test_a_source_tree_knows_its_extras_by_its_project_file(monkeypatch: pytest.MonkeyPatch) -> None:
    extras.requirement_lines.cache_clear()
    monkeypatch.setattr(extras, "requires", lambda name: 1 / 0)
    assert extras.packages_of("verifiers") == ["verifiers==0.4.0", *extras.packages_of("renderers")]
    for extra in PROJECT["optional-dependencies"]:
        assert extras.packages_of(extra), extra
        assert "headway" not in extras.install_command(extra)


def test_without_metadata_nothing_is_known(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", missing)
    assert extras.packages_of("plot") == []


def calls() -> Iterator[tuple[Path, ast.Call]]:
    for file in sorted((ROOT / "src").rglob("*.py")):
        text = file.read_text()
        # To parse all files takes seconds.
        for node in ast.walk(ast.parse(text)) if "install_command" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "install_command":
                yield file, node


def test_messages_name_extras_that_exist() -> None:
    named = [(file, word.value) for file, call in calls() for word in call.args if isinstance(word, ast.Constant)]
    assert len(named) > 10
    assert [pair for pair in named if pair[1] not in PROJECT["optional-dependencies"]] == []


def test_no_text_of_the_program_installs_headway_by_its_name() -> None:
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and file.name != "extras.py":
                assert "headway[" not in node.value and "pip install headway" not in node.value, (file, node.lineno)
