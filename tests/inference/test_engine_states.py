"""Recurrent states in the engine: shared by equal prefixes, kept for the next turn, bounded in number."""

from typing import Any

import pytest
from engine_common import make_engine, make_model, mismatch, prompt, request, run_all

from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.scheduling.snapshots import Snapshots
from headway.models.families.qwen3_5 import Qwen35Config
from headway.models.ops import registry

HYBRID = Qwen35Config(
    family="qwen3_5_text", vocab_size=97, width=32, layers=3, heads=4, kv_heads=2, head_dim=8, mlp_width=48,
    rotary_dim=4, norm_eps=1e-2, tied=True, max_len=256, linear_layers=(0, 2), linear_key_heads=2,
    linear_value_heads=4, linear_key_dim=8, linear_value_dim=8,
)  # fmt: skip
TOLERANCE = 1e-4


@pytest.fixture(params=["plain", "tiles"], autouse=True)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The runner of CPUs, and that of accelerators with the operations' references."""
    if request.param == "tiles":
        monkeypatch.setattr(registry, "in_triton", lambda weight: True)
    return str(request.param)


class CountingEngine:
    """An engine of the hybrid model, and the tokens of its steps."""

    def __init__(self, **limits: Any) -> None:
        self.model = make_model(HYBRID)
        self.engine: EmbeddedEngine = make_engine(make_model(HYBRID), **limits)
        self.tokens = 0
        schedule = self.engine.scheduler.schedule

        def counted(most_repeats: int) -> Any:
            step = schedule(most_repeats)
            self.tokens += sum(step.counts)
            return step

        self.engine.scheduler.schedule = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [0, 1])
def test_choices_of_one_prompt_share_its_state(depth: int) -> None:
    case, tokens = CountingEngine(depth=depth), prompt(23)
    (result,) = run_all(case.engine, [request(tokens, 6, n=4)])
    for choice in result.choices:
        assert mismatch(case.model, tokens, choice) < TOLERANCE
    # The first runs the prompt; the others start from the state after 20 tokens, the last full block before its end.
    prefill, decode = 23 + 3 * 3, 4 * 5
    assert prefill + decode <= case.tokens <= prefill + decode + 4 * depth


@pytest.mark.parametrize("depth", [0, 1])
def test_the_next_turn_goes_on_from_the_last_boundary(depth: int) -> None:
    case, tokens = CountingEngine(depth=depth), prompt(18)
    (first,) = run_all(case.engine, [request(tokens, 12, ignore_eos=True)])
    longer = [*tokens, *first.choices[0].token_ids, *prompt(7)]
    (second,) = run_all(case.engine, [request(longer, 6)])
    # 29 of the 30 tokens were computed: their last boundary is 28, or 24 where the name of its block came too late.
    assert second.cached_tokens in ((28,) if depth == 0 else (24, 28))
    assert mismatch(case.model, longer, second.choices[0]) < TOLERANCE


def test_a_prefix_that_others_share_gets_a_state_where_they_part() -> None:
    case, shared = CountingEngine(), prompt(16)
    cached = []
    for seed in range(3):
        tokens = [*shared, *prompt(9, seed)]
        (result,) = run_all(case.engine, [request(tokens, 4)])
        cached.append(result.cached_tokens)
        assert mismatch(case.model, tokens, result.choices[0]) < TOLERANCE
    assert cached == [0, 0, 16]


def test_a_few_snapshots_serve_many_prompts_right() -> None:
    case = CountingEngine(num_snapshots=2)
    prompts = [prompt(13 + seed % 3, seed) for seed in range(9)]
    for _ in range(2):
        results = run_all(case.engine, [request(tokens, 9) for tokens in prompts])
        for tokens, result in zip(prompts, results, strict=True):
            assert mismatch(case.model, tokens, result.choices[0]) < TOLERANCE
    (again,) = run_all(case.engine, [request(prompts[-1], 4)])
    assert mismatch(case.model, prompts[-1], again.choices[0]) < TOLERANCE


def test_a_preempted_sequence_saves_the_state_after_its_prompt_again() -> None:
    """When it starts again, its blocks are gone, and it has more than the prompt to compute."""
    case, tokens = CountingEngine(num_blocks=13), prompt(21)
    first, second = (request(content, 24, ignore_eos=True) for content in (prompt(17), tokens))
    (_, result) = run_all(case.engine, [first, second])
    assert case.engine.scheduler.preemptions > 0
    assert mismatch(case.model, tokens, result.choices[0]) < TOLERANCE
    (again,) = run_all(case.engine, [request([*tokens[:-1], 5], 4)])
    assert again.cached_tokens == 20
    assert mismatch(case.model, [*tokens[:-1], 5], again.choices[0]) < TOLERANCE


@pytest.mark.parametrize("limits", [{"prefix_cache": False}, {"num_snapshots": 0}])
def test_without_snapshots_no_prefix_is_reused(limits: dict[str, Any]) -> None:
    case, tokens = CountingEngine(**limits), prompt(21)
    for _ in range(2):
        (result,) = run_all(case.engine, [request(tokens, 5)])
        assert result.cached_tokens == 0
        assert mismatch(case.model, tokens, result.choices[0]) < TOLERANCE


def test_a_new_sequence_never_sees_the_state_of_the_one_before_in_its_row() -> None:
    case = CountingEngine(max_running=1, prefix_cache=False)
    for seed in range(3):
        tokens = prompt(6, seed)
        (result,) = run_all(case.engine, [request(tokens, 5)])
        assert mismatch(case.model, tokens, result.choices[0]) < TOLERANCE


def test_a_snapshot_is_found_after_its_step_and_the_least_recently_used_goes_first() -> None:
    snapshots = Snapshots(10, 2)
    first, second = snapshots.reserve(), snapshots.reserve()
    assert {first, second} == {10, 11} and snapshots.reserve() is None
    assert first is not None and second is not None
    snapshots.name(first, b"a")
    assert snapshots.deepest([b"a"]) == (0, None) and snapshots.coming(b"a")
    snapshots.settle()
    snapshots.name(second, b"b")
    snapshots.settle()
    assert snapshots.deepest([b"a", b"missing"]) == (1, first)
    assert snapshots.reserve() == second, "b was not used since"
    assert b"b" not in snapshots and b"a" in snapshots
    snapshots.forget_all()
    assert snapshots.reserve() == first and snapshots.reserve() is None
