"""Folders of tasks: archives named by content, records as JSON lines, and damage that is noticed."""

import gzip
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from headway.base.errors import UsageError
from headway.envs.swe.archives import File, pack, read_source, unpack
from headway.envs.swe.patches import make_patch
from headway.envs.swe.tasks import Repository, SweTask, TaskFolder, broken_files, hidden_files

FILES = {"m.py": File(b"x = 1\n"), "bin/run": File(b"#!/bin/sh\n", True), "tests/test_m.py": File(b"")}


def repository(archive: str) -> Repository:
    return Repository("m-1", archive, "root", ["."], ["m.py"], ["tests/test_m.py"], ["tests/test_m.py::test_x"])


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = TaskFolder(tmp_path)
    name = folder.store(FILES)
    assert folder.store(dict(reversed(FILES.items()))) == name  # the same files, the same name
    patch = make_patch({"m.py": "x = 2\n"}, {"m.py": "x = 1\n"})
    task = SweTask("t", "issue", ["tests/test_m.py::test_x"], "m-1", patch=patch, kinds=["boundary"])
    folder.write([repository(name)], [task])
    again = TaskFolder(tmp_path)
    assert again.tasks() == [task] and again.repositories() == {"m-1": repository(name)}
    files = again.files(repository(name))
    assert files == FILES
    assert broken_files(files, task)["m.py"].data == b"x = 2\n"
    assert hidden_files(task) == {"tests/test_m.py"}


def test_damage_is_noticed(tmp_path: Path) -> None:
    folder = TaskFolder(tmp_path)
    name = folder.store(FILES)
    path = tmp_path / "repositories" / f"{name}.tar.gz"
    path.write_bytes(gzip.compress(pack({**FILES, "m.py": File(b"x = 9\n")})))
    with pytest.raises(UsageError, match="not what its name says"):
        folder.files(repository(name))
    with pytest.raises(UsageError, match=r"tasks.jsonl.*headway swe make"):
        folder.tasks()
    (tmp_path / "tasks.jsonl").write_text('{"id": 3}\n')
    with pytest.raises(UsageError, match=r"tasks.jsonl:1: .*str"):
        folder.tasks()
    with pytest.raises(UsageError, match="is missing: copy the whole folder"):
        folder.root(repository(name))


def test_archives_and_folders_are_read_alike(tmp_path: Path) -> None:
    inside = {f"m-1/{path}": file for path, file in FILES.items()}
    (tmp_path / "m-1.tar.gz").write_bytes(gzip.compress(pack(inside)))
    with zipfile.ZipFile(tmp_path / "m-1.zip", "w") as archive:
        for path, file in inside.items():
            archive.writestr(path, file.data)
    for path, file in inside.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(file.data)
    (tmp_path / "m-1" / "bin" / "run").chmod(0o755)
    (tmp_path / "m-1" / "link").symlink_to("/etc/passwd")
    assert read_source(tmp_path / "m-1.tar.gz") == read_source(tmp_path / "m-1") == FILES
    assert read_source(tmp_path / "m-1.zip").keys() == FILES.keys()
    with pytest.raises(UsageError, match="no such folder"):
        read_source(tmp_path / "nothing")


def test_archives_that_reach_out_are_refused() -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../../etc/x"), io.BytesIO())
    with pytest.raises(UsageError, match="outside of it"):
        unpack(packed.getvalue())
    link = io.BytesIO()
    with tarfile.open(fileobj=link, mode="w") as archive:
        entry = tarfile.TarInfo("x")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(entry)
    assert unpack(link.getvalue()) == {}
    with pytest.raises(UsageError, match="not a readable archive"):
        unpack(b"nothing")
