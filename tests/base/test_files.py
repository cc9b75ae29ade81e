"""Files appear whole or not at all, even when the writer is killed."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.base.files import atomic_directory, reserve, write_atomic
from headway.core.runs import RunPaths
from headway.monitor.metrics import MetricsWriter, read_metrics


def kill_while_running(code: str, folder: Path, sign: Path, seconds: float) -> None:
    """Start a process, wait until it has made `sign`, and kill it `seconds` later."""
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)])
    try:
        deadline = time.monotonic() + 120
        while not sign.exists():
            assert process.poll() is None, "the writer ended by itself"
            assert time.monotonic() < deadline, "the writer never wrote"
            time.sleep(0.001)
        time.sleep(seconds)
    finally:
        process.kill()
        process.wait()


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    code = (
        "import itertools, pathlib, sys\n"
        "from headway.base.files import write_atomic\n"
        "for n in itertools.count():\n"
        "    write_atomic(pathlib.Path(sys.argv[1]) / 'state', bytes([n % 256]) * 200_000)\n"
    )
    for seed in range(4):
        kill_while_running(code, tmp_path, tmp_path / "state", random.Random(seed).uniform(0, 0.05))
        content = (tmp_path / "state").read_bytes()
        assert len(content) == 200_000
        assert len(set(content)) == 1


def test_killed_metrics_continue_with_every_step_once(tmp_path: Path) -> None:
    code = (
        "import itertools, pathlib, sys\n"
        "from headway.core.runs import RunPaths\n"
        "from headway.monitor.metrics import MetricsWriter\n"
        "writer = MetricsWriter(RunPaths(pathlib.Path(sys.argv[1])), 'trainer')\n"
        "for step in itertools.count(1):\n"
        "    writer.log(step, {f'metric_{i}': i / 7 for i in range(50)})\n"
    )
    path = RunPaths(tmp_path).metrics / "trainer.jsonl"
    kill_while_running(code, tmp_path, path, 0.05)
    reached = [line["step"] for line in read_metrics(path)]
    assert reached == list(range(1, len(reached) + 1))
    checkpoint = len(reached) // 2
    writer = MetricsWriter(RunPaths(tmp_path), "trainer", resume_step=checkpoint)
    for step in range(checkpoint + 1, checkpoint + 4):
        writer.log(step, {"loss": 1.0})
    writer.close()
    assert [line["step"] for line in read_metrics(path)] == list(range(1, checkpoint + 4))


def test_writing_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "c"
    write_atomic(path, "one")
    write_atomic(path, b"two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["c"]


def test_a_folder_appears_when_it_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "step"
    for text in ("one", "two"):
        with atomic_directory(path) as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "file").write_text(text)
            (folder / "link").symlink_to("nowhere")
            assert not path.exists() or (path / "deep" / "file").read_text() == "one"
        assert (path / "deep" / "file").read_text() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["step"]


def test_a_folder_whose_filling_fails_never_appears(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "step") as folder:
        (folder / "file").write_text("x")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_file_gets_its_size_where_the_system_cannot_reserve_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * 2**20 + 5
    for name in ("reserved", "written"):
        with (tmp_path / name).open("w+b") as file:
            reserve(file, size)
        assert (tmp_path / name).read_bytes() == bytes(size)
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
