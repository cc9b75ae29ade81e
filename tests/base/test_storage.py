"""Folders in storage elsewhere: whole or not there."""

import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from headway.base.errors import UsageError
from headway.base.storage import MANIFEST, DamagedCopyError, Storage, StorageError

FILES = {"a.bin": b"\x00" * 1000, "deep/er/b.txt": b"words", ".hidden": b"", "empty": b""}


@pytest.fixture(params=["memory", "file", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return f"{'file://' if request.param == 'file' else ''}{tmp_path}/storage"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / "made" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made" / name).write_bytes(content)
    return tmp_path / "made"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_comes_back_as_it_was(url: str, folder: Path, tmp_path: Path) -> None:
    storage = Storage(url)
    assert storage.names("kept") == [] and storage.read("note") is None
    storage.upload(folder, "kept/one")
    storage.upload(folder, "kept/two")
    storage.write("note", b"mine")
    assert Storage(f"{url}/").names("kept") == ["one", "two"] and Storage(url).read("note") == b"mine"
    storage.download("kept/one", tmp_path / "back")
    assert files_of(tmp_path / "back") == FILES
    (folder / "a.bin").unlink()
    storage.upload(folder, "kept/one")
    storage.download("kept/one", tmp_path / "back")
    assert "a.bin" not in files_of(tmp_path / "back"), "a copy is replaced, not mixed"
    storage.remove("kept/one")
    storage.remove("kept/never")
    assert storage.names("kept") == ["two"]


def break_file(path: str) -> None:
    files, path = fsspec.core.url_to_fs(path)
    files.pipe_file(path, b"\x01" + files.cat_file(path)[1:])


def cut_file(path: str) -> None:
    files, path = fsspec.core.url_to_fs(path)
    files.pipe_file(path, files.cat_file(path)[:-1])


def lose_file(path: str) -> None:
    files, path = fsspec.core.url_to_fs(path)
    files.rm_file(path)


@pytest.mark.parametrize("name", ["a.bin", "deep/er/b.txt", MANIFEST])
@pytest.mark.parametrize("damage", [break_file, cut_file, lose_file])
def test_a_damaged_copy_leaves_nothing_here(
    url: str, folder: Path, tmp_path: Path, name: str, damage: Callable[[str], None]
) -> None:
    Storage(url).upload(folder, "kept/one")
    damage(f"{url}/kept/one/{name}")
    with pytest.raises(DamagedCopyError, match="kept/one"):
        Storage(url).download("kept/one", tmp_path / "back" / "one")
    assert not list((tmp_path / "back").glob("*")) if (tmp_path / "back").exists() else True


def test_a_copy_without_its_manifest_is_none(url: str, folder: Path) -> None:
    Storage(url).upload(folder, "kept/one")
    lose_file(f"{url}/kept/one/{MANIFEST}")
    assert Storage(url).names("kept") == []


def test_a_manifest_may_not_name_files_outside(url: str, folder: Path, tmp_path: Path) -> None:
    storage = Storage(url)
    storage.upload(folder, "kept/one")
    storage.write(f"kept/one/{MANIFEST}", b'{"../../stolen": {"size": 0, "sha256": ""}}')
    with pytest.raises(DamagedCopyError, match="outside"):
        storage.download("kept/one", tmp_path / "back" / "one")


def test_places_that_cannot_be_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match="nothing://x is not a place for files"):
        Storage("nothing://x")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match="file"):
        Storage(f"{tmp_path}/file").upload(folder, "one")
