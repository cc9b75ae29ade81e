"""Full disks and read-only folders: one clear line, nothing half-written."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.base.errors import HeadwayError
from headway.base.files import atomic_directory, write_atomic
from headway.config.shared import RunSettings
from headway.core.runs import RunPaths
from headway.monitor.metrics import MetricsWriter
from headway.monitor.runs import create_run


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own in memory. Skips the test where mounting is not permitted."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount a small file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=64k") as folder:
        yield folder


QUOTA = 16384


def under_quota(check: Callable[[Path], None], folder: Path) -> None:
    """Run `check` in a process of its own whose writes beyond `QUOTA` bytes into one file fail.

    In this process the limit would hit the test report too, where that goes to a file.
    """
    code = (
        "import resource, sys, pathlib\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import {__name__} as checks\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({QUOTA}, {QUOTA}))\n"
        f"checks.{check.__name__}(pathlib.Path(sys.argv[1]))\n"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def fill(folder: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def log_until_refused(folder: Path) -> tuple[str, Path, int]:
    writer = MetricsWriter(RunPaths(folder), "trainer")
    logged = 0
    with pytest.raises(HeadwayError) as caught:
        while True:
            writer.log(logged, {f"metric_{index}": 1 / 3 for index in range(40)})
            logged += 1
    writer.close()
    return str(caught.value), writer.path, logged


def check_whole(message: str, path: Path, logged: int, reason: str) -> None:
    assert message == f"{path}: cannot write metrics: {reason}; free some space and continue with --resume"
    text = path.read_text()
    assert text.endswith("}\n")
    assert [json.loads(line)["step"] for line in text.splitlines()] == list(range(logged))


def test_metrics_on_a_full_disk_stay_whole(small_disk: Path) -> None:
    check_whole(*log_until_refused(small_disk), reason="No space left on device")


def metrics_over_a_quota(folder: Path) -> None:
    check_whole(*log_until_refused(folder), reason="File too large")


def test_metrics_over_a_quota_stay_whole(tmp_path: Path) -> None:
    under_quota(metrics_over_a_quota, tmp_path)


def file_over_a_quota(folder: Path) -> None:
    path = folder / "state"
    write_atomic(path, "old")
    with pytest.raises(OSError, match="File too large"):
        write_atomic(path, bytes(QUOTA + 1))
    assert path.read_text() == "old"
    assert [entry.name for entry in folder.iterdir()] == ["state"]


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    under_quota(file_over_a_quota, tmp_path)


def folder_over_a_quota(parent: Path) -> None:
    path = parent / "step"
    with atomic_directory(path) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(OSError, match="File too large"), atomic_directory(path) as folder:
        (folder / "a").write_text("new")
        (folder / "b").write_bytes(bytes(QUOTA + 1))
    assert [entry.name for entry in parent.iterdir()] == ["step"]
    assert (path / "a").read_text() == "old"


def test_an_atomic_folder_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    under_quota(folder_over_a_quota, tmp_path)


def test_no_run_folder_is_left_on_a_full_disk(small_disk: Path) -> None:
    fill(small_disk)
    with pytest.raises(
        HeadwayError, match=r"cannot make the run folder: No space left.*choose another --run.output_dir"
    ):
        create_run(RunSettings(name="a", output_dir=small_disk), "rl")
    assert [entry.name for entry in small_disk.iterdir()] == ["ballast"]


def test_a_read_only_output_folder_is_one_line(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "ro") as folder:
        command = [
            sys.executable,
            "-m",
            "headway.cli.main",
            "train",
            "--run.output_dir",
            str(folder),
            "--run.name",
            "a",
        ]
        done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        f"headway: {folder}/a: cannot make the run folder: Read-only file system; choose another --run.output_dir\n"
    )


def test_logs_on_a_full_disk_are_said_once_and_the_process_goes_on(small_disk: Path) -> None:
    fill(small_disk)
    (small_disk / "ballast").write_bytes(bytes(60 * 1024))
    code = (
        "import logging, sys, pathlib\n"
        "from headway.core.runs import RunPaths\n"
        "from headway.monitor.logs import setup_logging\n"
        "setup_logging('trainer', RunPaths(pathlib.Path(sys.argv[1])))\n"
        "for step in range(20): logging.getLogger('headway.x').info('step %d %s', step, 'x' * 1000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(small_disk)], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.count("No space left on device; continuing without this log file") == 1
    assert all(f"step {step} " in done.stderr for step in range(20))
    assert "Traceback" not in done.stderr
