"""Records of rollouts: what is written in parts is read as one."""

from pathlib import Path

from headway.core.episodes import Episode, Node, Task, Trace
from headway.core.records import RolloutRecord, read_rollouts, rollout_lines, write_rollouts
from headway.core.runs import RunPaths


def record(number: int, tokens: int) -> RolloutRecord:
    node = Node(-1, [number] * tokens, logprobs=[-number / 7] * tokens, versions=[(1, tokens)])
    return RolloutRecord(
        1, "env", "group", 0.5, Episode(f"{number}", "group", "env", Task("t"), traces=[Trace(nodes=[node])])
    )


def test_records_of_many_megabytes_come_back_in_order(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    written = [record(number, 1500) for number in range(100)]
    write_rollouts(paths, 1, written)
    assert list(read_rollouts(paths, 1)) == written
    assert sum(map(len, rollout_lines(paths.rollout_records(1), 1 << 30))) > 2 << 20
    write_rollouts(paths, 2, [])
    assert list(read_rollouts(paths, 2)) == []
