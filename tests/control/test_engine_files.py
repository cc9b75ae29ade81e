"""The list of a run's engines: always that of the folder, and read only as often as that changes."""

import os
from pathlib import Path

import pytest
from control_helpers import Clock

from headway.transport.control.engines import EngineFiles


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engines(tmp_path: Path, clock: Clock) -> EngineFiles:
    return EngineFiles(tmp_path / "engines", clock)


def settle(engines: EngineFiles, clock: Clock) -> dict[str, str]:
    """List the engines often enough for the list to be kept."""
    for _ in range(3):
        clock.now += 10
        listed = engines.urls()
    return listed


def test_the_list_follows_the_folder_whoever_changes_it(engines: EngineFiles, tmp_path: Path, clock: Clock) -> None:
    assert settle(engines, clock) == {}, "there is no folder yet"
    other = EngineFiles(tmp_path / "engines")
    for change, expected in (
        (lambda: other.add("b", "http://b:1/", 1), {"b": "http://b:1"}),
        (lambda: engines.add("a", "http://a:1", 2), {"a": "http://a:1", "b": "http://b:1"}),
        (lambda: other.add("a", "http://a:2", 3), {"a": "http://a:2", "b": "http://b:1"}),
        (lambda: other.remove("b"), {"a": "http://a:2"}),
        (lambda: (tmp_path / "engines" / "c.json").write_text("{"), {"a": "http://a:2"}),
    ):
        change()
        assert engines.urls() == expected
        assert settle(engines, clock) == expected


def test_files_are_read_once(engines: EngineFiles, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    engines.add("a", "http://a:1", 1)
    listed = settle(engines, clock)
    listed["mine"] = "what a caller does with the list is its own"

    def refuse(_: Path) -> bytes:
        raise AssertionError("read again")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert engines.urls() == {"a": "http://a:1"}


def test_a_change_reads_only_the_files_that_changed(engines: EngineFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        engines.add(name, f"http://{name}:1", 1)
    engines.urls()
    read: list[str] = []
    real = Path.read_bytes

    def note(path: Path) -> bytes:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", note)
    engines.add("d", "http://d:1", 1)
    engines.remove("a")
    engines.add("b", "http://b:2", 1)
    assert engines.urls() == {"b": "http://b:2", "c": "http://c:1", "d": "http://d:1"}
    assert read == ["b.json", "d.json"]


def test_an_engine_that_leaves_and_comes_back_elsewhere_is_read_again(engines: EngineFiles) -> None:
    for port in range(20):  # a file system may give the new file the number of the one that is gone
        engines.remove("a")
        engines.add("a", f"http://a:{port}", 1)
        assert engines.urls() == {"a": f"http://a:{port}"}


def test_a_change_in_the_same_tick_of_the_disks_clock_is_seen(
    engines: EngineFiles, tmp_path: Path, clock: Clock
) -> None:
    folder = tmp_path / "engines"
    engines.add("a", "http://a:1", 1)
    before = folder.stat()
    for _ in range(2):
        assert engines.urls() == {"a": "http://a:1"}
    engines.add("b", "http://b:1", 2)
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert set(engines.urls()) == {"a", "b"}
    assert set(settle(engines, clock)) == {"a", "b"}
