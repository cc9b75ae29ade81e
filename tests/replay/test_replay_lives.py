"""A journal as the lives of processes: which batches count, and what can be replayed of them."""

from pathlib import Path

import pytest

from headway.base.errors import UsageError
from headway.core.journal import Began, Event, Formed, JournalFile, Looked, Seen, Sent
from headway.core.runs import RunPaths
from headway.replay.command import choose_steps
from headway.replay.lives import History, read_history


def history_of(folder: Path, *events: Event) -> History:
    file = JournalFile(RunPaths(folder).journal, 1 << 20)
    for event in events:
        file.add(event)
    file.close()
    return read_history(RunPaths(folder))


def batch(step: int) -> list[Event]:
    return [Looked(1), Formed(step, [f"{step}"]), Sent(step, bytes([step]))]


def test_batches_that_were_collected_again_count_once(tmp_path: Path) -> None:
    history = history_of(
        tmp_path,
        *(Began(0, 0, prefix="a"), *batch(1), *batch(2), *batch(3)),
        *(Began(0, 1, prefix="b"), *batch(2)),
        *(Began(0, 2, prefix="c"), Seen(1, 2, False, "v2"), *batch(3), Seen(3, 3, False, "v3")),
    )
    assert [sorted(life.kept) for life in history.lives] == [[1], [2], [3]]
    assert history.steps == [1, 2, 3] and history.first_step == 0
    assert history.fingerprints == {2: "v2", 3: "v3"} and history.digests[3] == b"\x03"


def test_a_run_that_began_from_a_checkpoint_is_replayed_from_there(tmp_path: Path) -> None:
    history = history_of(tmp_path, Began(0, 4), *batch(5), *batch(6))
    assert history.first_step == 4
    assert choose_steps(RunPaths(tmp_path), history, 4, None, train=False) == {5, 6}
    assert choose_steps(RunPaths(tmp_path), history, 4, 5, train=False) == {5}


def test_what_cannot_be_replayed_is_refused_with_the_reason(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(UsageError, match="there is no journal"):
        read_history(paths)
    history = history_of(tmp_path, Began(0, 0), *batch(1), *batch(2), Began(0, 3), *batch(4))
    with pytest.raises(UsageError, match="no checkpoint of it"):
        choose_steps(paths, history, 1, None, train=True)
    with pytest.raises(UsageError, match="lacks step 3"):
        choose_steps(paths, history, 0, None, train=False)
    with pytest.raises(UsageError, match="nothing to replay after step 4"):
        choose_steps(paths, history, 4, None, train=False)
