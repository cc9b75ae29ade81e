"""Processes that end with their parent, usable cores and memory, free ports, and what "auto" means."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.base.devices import resolve_device, resolve_dtype
from headway.base.errors import UsageError
from headway.base.processes import PARENT, available_memory, consecutive_ports, free_port, usable_cores

CHILD = """
import time
from headway.base.processes import die_with_parent_if_asked
die_with_parent_if_asked()
print("up", flush=True)
time.sleep(60)
"""
PARENT_OF = f"""
import os, subprocess, sys, time
from headway.base.processes import die_with_parent_command, die_with_parent_environment
command = [sys.executable, "-c", {CHILD!r}] if sys.argv[1] == "ours" else die_with_parent_command(["sleep", "60"])
child = subprocess.Popen(command, env={{**os.environ, **die_with_parent_environment()}})
print(child.pid, flush=True)
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("kind", ["ours", "foreign"])
def test_a_child_ends_with_a_parent_that_is_killed(kind: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT_OF, kind], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if kind == "ours":
            assert parent.stdout.readline() == "up\n"
        else:
            deadline = time.monotonic() + 120
            while b"python" in Path(f"/proc/{child}/cmdline").read_bytes() and time.monotonic() < deadline:
                time.sleep(0.05)
        assert is_running(child)
        parent.kill()
    deadline = time.monotonic() + 120
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    child = subprocess.run([sys.executable, "-c", CHILD], env={**os.environ, PARENT: str(gone.pid)}, timeout=30)
    assert child.returncode == 1


def test_usable_cores_are_at_most_those_of_the_machine() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_ports_are_free_and_a_taken_one_is_named() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UsageError, match=f"127.0.0.1:{port}.*--port"):
        consecutive_ports("127.0.0.1", port, 2)
    assert len(set(consecutive_ports("127.0.0.1", 0, 3))) == 3


def test_auto_is_the_gpu_with_bfloat16_where_there_is_one() -> None:
    assert (resolve_device("auto", True), resolve_device("auto", False)) == ("cuda", "cpu")
    assert resolve_device("cpu", True) == "cpu"
    with pytest.raises(UsageError, match=r"placement\.device"):
        resolve_device("cuda", False)
    assert (resolve_dtype("auto", "cuda"), resolve_dtype("auto", "cpu")) == ("bfloat16", "float32")
    assert resolve_dtype("float32", "cuda") == "float32"


def test_available_memory_is_that_of_the_container(tmp_path: Path) -> None:
    free, total = available_memory(tmp_path)
    assert 0 < free <= total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    assert available_memory(tmp_path)[1] == total
    (tmp_path / "memory.max").write_text("8000000\n")
    assert available_memory(tmp_path) == (5000000, 8000000)
    (tmp_path / "memory.stat").write_text("anon 1000000\ninactive_file 2000000\n")
    assert available_memory(tmp_path) == (7000000, 8000000)
    (tmp_path / "memory.current").write_text("99000000\n")
    assert available_memory(tmp_path) == (0, 8000000)
