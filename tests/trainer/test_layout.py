"""Layouts: sums that hold for all of them, what a dry run says, and the table of the documentation."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_helpers import small_settings

from headway.cli.main import run
from headway.models.costs import parameter_count
from headway.models.tiny import BUILT_IN
from headway.trainer.layout_report import describe_layout, readable
from headway.trainer.parallel.dims import ParallelDims
from headway.trainer.parallel.layout import Layout

ROOT = Path(__file__).parents[2]
CONFIG = replace(BUILT_IN["tiny-moe"], vocab_size=256, experts=12)


@given(expert=st.sampled_from([1, 2, 3, 4, 6, 12]), rest=st.integers(1, 16), replicate=st.integers(1, 4))
def test_the_ranks_of_a_copy_hold_all_weights(expert: int, rest: int, replicate: int) -> None:
    layout = Layout(CONFIG, ParallelDims(replicate=replicate, shard=expert * rest, expert=expert))
    ranks = layout.dims.copy_size
    assert layout.weights_held * ranks >= parameter_count(CONFIG)
    assert layout.experts_held * ranks >= CONFIG.experts
    # At most one expert more than an even share.
    assert layout.experts_held <= CONFIG.experts // ranks + 1


@given(expert=st.sampled_from([1, 2, 4]), replicate=st.integers(1, 3), tokens=st.integers(1, 5000))
def test_dimensions_of_one_rank_send_nothing(expert: int, replicate: int, tokens: int) -> None:
    layout = Layout(CONFIG, ParallelDims(replicate=replicate, shard=4, expert=expert))
    sent = {traffic.dimension for traffic in layout.traffic(tokens)}
    assert ("expert" in sent) == (expert > 1)
    assert ("expert_shard" in sent) == (expert == 2)
    assert ("replicate" in sent) == (replicate > 1)
    assert all(0 < traffic.sent < 2 * traffic.payload for traffic in layout.traffic(tokens))


def test_more_expert_ranks_gather_fewer_experts_and_exchange_more_rows() -> None:
    def bytes_of(expert: int, what: str) -> int:
        layout = Layout(CONFIG, ParallelDims(shard=12, expert=expert))
        return sum(t.sent for t in layout.traffic(100) if what in t.what)

    assert bytes_of(1, "experts") > bytes_of(2, "experts") > bytes_of(4, "experts") > bytes_of(12, "experts") == 0
    assert 0 == bytes_of(1, "rows") < bytes_of(2, "rows") < bytes_of(4, "rows")


def test_a_description_names_ranks_bytes_and_dimensions() -> None:
    settings = small_settings(placement__trainer_ranks=8, trainer__parallel={"expert": 2, "replicate": 2})
    text = describe_layout(settings, replace(CONFIG, experts=8))
    assert "8 ranks: replicate 2 x shard 4 x context 1" in text
    assert "a rank computes with 4 of 8 experts of a layer and stores at most 2" in text
    assert "each rank holds about" in text and "expert (2 ranks)" in text and "expert_shard (2 ranks)" in text
    assert readable(1536 * 2**20) == "1.5 GiB" and readable(7) == "7 B"


def test_a_dry_run_says_who_holds_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--placement.trainer_ranks", "2", "--trainer.parallel.expert", "2", "--run.output_dir", str(tmp_path)]
    assert run(["train", "--model.path", "tiny-moe", *flags, "--dry-run"]) == 0
    assert "expert (2 ranks)" in capsys.readouterr().out


def test_the_documentation_has_the_table_that_the_formulas_give() -> None:
    printed = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "layouts.py")], capture_output=True, text=True, check=True
    ).stdout
    page = (ROOT / "docs" / "scaling.md").read_text()
    assert printed.strip() in page, "run `python benchmarks/layouts.py` and put its table into docs/scaling.md"
