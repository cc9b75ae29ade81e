"""Import by path: modules, files, the current folder, and errors that say which setting was wrong."""

from pathlib import Path

import pytest

from headway.core.errors import UsageError
from headway.core.imports import absolute_path, load_object


def test_modules_files_and_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_object("math:sqrt", "reward")(4.0) == 2.0
    (tmp_path / "mine_here.py").write_text("def double(x):\n    return 2 * x\n")
    assert load_object(f"{tmp_path / 'mine_here.py'}:double", "reward")(3) == 6
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    assert load_object("mine_here:double", "reward")(4) == 8


def test_a_file_is_found_from_another_folder_once_its_path_is_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute_path("mine.py:Name") == f"{tmp_path.resolve()}/mine.py:Name"
    assert absolute_path("~/mine.py:Name") == "/home/me/mine.py:Name"
    assert absolute_path("package.module:Name") == "package.module:Name"


def test_dataclasses_of_a_file_find_their_module(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Made:\n    x: int = 1\n"
    )
    assert load_object(f"{tmp_path / 'made.py'}:Made", "environment")().x == 1


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nothing", "write module:name or file.py:name"),
        ("no_such_module:x", "could not be imported: ModuleNotFoundError"),
        ("no/such/file.py:x", "there is no file"),
        ("math:nothing", "math has no class or function nothing"),
        ("math:pi", "is a float, not a class or function"),
    ],
)
def test_errors_name_the_setting_and_the_reason(path: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        load_object(path, "trainer.loss.path")
    assert str(caught.value).startswith(f'trainer.loss.path "{path}"')
