"""The simulation of a swarm, with few workers: liars are cut off, lies stay few, honest work comes through."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "swarm_parts"))

from swarm_simulation import LIARS, Scene, simulate  # noqa: E402 - lies there

SCENE = Scene(workers=20, minutes=4.0, seconds=(15.0, 20.0), batch=20, step_seconds=5.0)


def test_liars_train_little_and_the_honest_lose_little(tmp_path: Path) -> None:
    found = simulate(SCENE, tmp_path)
    lies, kinds = found["lies"], found["lies_by_kind"]
    assert isinstance(lies, dict) and isinstance(kinds, dict)
    # An order takes up to a twelfth of the time, and those that are under way at the end are lost.
    assert found["throughput"] >= 0.85  # type: ignore[operator]
    assert set(kinds) <= set(LIARS) and "accepted" not in kinds["rewards"] and "accepted" not in kinds["weights"]
    assert kinds["weights"]["refused by logprobs"] >= 3 and found["keys_cut_off"] >= 2  # type: ignore[operator]
    # Two have a good name from the start, so that little of their work is rescored. One lies about all episodes of an
    # order, and never gets through; the other about one of them, and does until it is found out.
    assert "accepted" not in kinds["sleeper"] and kinds["sleeper"]["refused by logprobs"] > 0
    assert kinds["careful"]["accepted"] > 0 and found["lies_trained"] == kinds["careful"]["trained"]
