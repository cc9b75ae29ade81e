"""Routing by what engines report: the policy, the summary of prefixes, and the bars of the benchmark."""

import importlib.util
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.prefixes import PrefixSummary, chain_hash, root_hash
from headway.core.routing import EngineView, rank_engines

ROOT = root_hash("weights")
VIEWS = st.lists(
    st.builds(
        EngineView,
        url=st.uuids().map(str),
        running=st.integers(0, 64),
        waiting=st.integers(0, 64),
        sent=st.integers(0, 64),
        rate=st.floats(0, 1e4),
        cached=st.integers(0, 1000),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda view: view.url,
)


def blocks(tokens: list[int], size: int = 4) -> list[bytes]:
    names, parent = [], ROOT
    for start in range(0, len(tokens) - size + 1, size):
        parent = chain_hash(parent, tokens[start : start + size])
        names.append(parent)
    return names


@given(VIEWS, st.integers(1, 10_000), st.integers())
def test_every_engine_is_ranked_once(views: list[EngineView], prompt: int, seed: int) -> None:
    ranked = rank_engines(views, prompt, Random(seed))
    assert sorted(view.url for view in ranked) == sorted(view.url for view in views)


def test_a_session_stays_with_its_cache_until_the_line_there_costs_more() -> None:
    home = EngineView("home", running=8, rate=50.0, cached=8000)
    idle = [EngineView(f"idle{i}", rate=50.0) for i in range(3)]
    assert rank_engines([*idle, home], 8200, Random(0))[0].url == "home"
    crowded = EngineView("home", running=8, waiting=40, rate=50.0, cached=8000)
    assert rank_engines([*idle, crowded], 8200, Random(0))[0].url != "home"


def test_without_a_cache_the_better_of_two_wins_and_requests_on_their_way_count() -> None:
    slow, fast = EngineView("slow", running=4, rate=5.0), EngineView("fast", running=4, rate=50.0)
    assert rank_engines([slow, fast], 100, Random(0))[0] is fast
    flooded = EngineView("fast", running=4, sent=100, rate=50.0)
    assert rank_engines([slow, flooded], 100, Random(0))[0] is slow


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(0, 15))
def test_a_summary_never_misses_what_is_cached(tokens: list[int], count: int) -> None:
    names = blocks(tokens)[:count]
    summary = PrefixSummary.of(names, 4, {"policy": ROOT})
    held = min(len(names), max(0, (len(tokens) - 1) // 4)) * 4
    assert summary.count_cached(tokens, "policy") >= held
    assert summary.count_cached(tokens, "another") == 0


def test_a_summary_is_small_and_rarely_wrong() -> None:
    names = [chain_hash(ROOT, [i]) for i in range(5000)]
    summary = PrefixSummary.of(names, 4, {"policy": ROOT})
    assert len(summary.bits) < 6300
    strangers = [[10_000 + i] * 5 for i in range(2000)]
    assert sum(summary.count_cached(tokens, "policy") > 0 for tokens in strangers) < 80


def test_the_benchmark_meets_its_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "routing.py"
    spec = importlib.util.spec_from_file_location("routing_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "routing_benchmark", module)
    spec.loader.exec_module(module)
    report = module.compare()
    assert report["reported"]["reuse_of_oracle"] >= 0.9
    assert report["p99_of_affinity"] <= 0.7
