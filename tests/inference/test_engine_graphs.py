"""Recorded steps, as far as they need no GPU: their sizes, and what happens where recording fails."""

from bisect import bisect_left
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.inference.embedded.device.graphs import Graphs, capture_sizes


@given(st.integers(1, 3000), st.data())
def test_every_step_has_a_size_that_is_little_larger(most: int, data: st.DataObject) -> None:
    sizes = capture_sizes(most)
    count = data.draw(st.integers(1, most))
    size = sizes[bisect_left(sizes, count)]
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    assert count <= size <= (1.5 * count if count > 16 else 2 * count)
    assert len(sizes) < 20 + most / 100


def test_where_recording_fails_steps_run_as_they_are_and_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(graphs: Graphs, work: Callable[[], None]) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(Graphs, "_capture", fail)
    graphs, runs = Graphs(enabled=True), list[int]()
    graphs.run("a step", lambda: runs.append(1))
    assert runs == [1], "states of recurrent layers would change twice"
    graphs.run("a step", lambda: runs.append(2))
    assert runs == [1, 2]
    assert not graphs.enabled
    assert "without CUDA graphs" in caplog.text
