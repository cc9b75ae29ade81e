"""Import by path: modules, files, the current folder, and errors that say which setting was wrong."""

import os
from pathlib import Path

import pytest

from headway.base.errors import UsageError
from headway.base.imports import absolute_path, load_object, make_object


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


def install(folder: Path, group: str, **names: str) -> None:
    """Put a package with entry points into `folder`, as an installer leaves it."""
    info = folder / "brought-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    lines = "".join(f"{name} = {path}\n" for name, path in names.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
    (folder / "brought.py").write_text("def double(x, times=2):\n    return times * x\n")


def test_names_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "headway.losses", double="brought:double")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_object("double", "trainer.loss.path", "headway.losses")(3) == 6
    assert make_object("double", {"x": 3, "times": 3}, "trainer.loss.path", "headway.losses") == 9
    with pytest.raises(UsageError, match='"dubble" is not known; did you mean "double"'):
        load_object("dubble", "trainer.loss.path", "headway.losses")
    with pytest.raises(UsageError, match=r"no installed package has an entry point in headway\.optimizers"):
        load_object("double", "trainer.optim.path", "headway.optimizers")
    with pytest.raises(UsageError, match=r"takes \(x, times=2\) and is called with \['y'\]"):
        make_object("double", {"y": 1}, "trainer.loss.path", "headway.losses")


def test_a_file_is_executed_once_and_again_after_it_was_edited(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    file.write_text("class Kind:\n    value = 1\n")
    kind = load_object(f"{file}:Kind", "x")
    assert load_object(f"{file}:Kind", "y") is kind
    file.write_text("class Kind:\n    value = 2\n")
    os.utime(file, ns=(1, 1))
    assert load_object(f"{file}:Kind", "x").value == 2
    file.write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(UsageError, match="ZeroDivisionError"):
            load_object(f"{file}:Kind", "x")


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
