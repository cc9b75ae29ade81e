"""Algorithms learn: short seeded runs on a CPU whose own signal rises well above its start."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import lookup
import pytest
from e2e_runs import Run, RunRl, rl_until, serving, short_words, warm_up, warm_up_on_short_words

from headway.core.runs import RunPaths
from headway.envs.bundled import reverse_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ON_POLICY = ("--orchestrator.max_lag", "0")


def assert_learned(run: Run, by: float) -> None:
    first, last = run.rise()
    assert last > first + by, f"reward went from {first:.3f} to {last:.3f}"


def assert_trainer_agrees_with_engine(run: Run) -> None:
    assert max(run.column("trainer", "mismatch_kl")) < 1e-4


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--weights.type", "filesystem"), id="grpo"),
        pytest.param(("--orchestrator.algorithm.type", "max_rl", "--rollouts.type", "zmq"), id="max_rl, zmq"),
        pytest.param(
            ("--orchestrator.algorithm.type", "rloo", "--weights.type", "shared_memory"), id="rloo, shared memory"
        ),
    ],
)
def test_on_policy(run_rl: RunRl, flags: tuple[str, ...]) -> None:
    run = run_rl("--max_steps", "20", *ON_POLICY, *flags)
    assert_learned(run, by=0.1)
    assert_trainer_agrees_with_engine(run)
    assert max(run.column("orchestrator", "lag/max")) == 0


def test_off_policy_by_up_to_eight_versions(run_rl: RunRl) -> None:
    run = run_rl("--max_steps", "20", "--orchestrator.max_lag", "8", "--weights.type", "point_to_point")
    assert_learned(run, by=0.1)
    assert 0 < max(run.column("orchestrator", "lag/max")) <= 8


def test_rae_measures_an_agent_against_its_own_past(run_rl: RunRl) -> None:
    run = run_rl("--max_steps", "20", "--orchestrator.algorithm.type", "rae")
    assert_learned(run, by=0.08)


def test_lora(run_rl: RunRl) -> None:
    run = run_rl("--max_steps", "20", *ON_POLICY, "--model.lora.rank", "16", "--trainer.optim.lr", "1e-3")
    assert_learned(run, by=0.08)
    assert_trainer_agrees_with_engine(run)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shape", ["tiny-glm4-moe", "tiny-gpt-oss", "tiny-hybrid"])
def test_families_learn(run_rl: RunRl, tmp_path_factory: pytest.TempPathFactory, shape: str) -> None:
    """Words of three letters, few and small steps. Without lag, and with routing replayed, the trainer computes what
    the engine sampled by."""
    small = ("--max_steps", "200", "--trainer.schedule.decay_steps", "100", "--seq_len", "512", "--batch_tokens", "512")
    model = warm_up_on_short_words(tmp_path_factory.mktemp(shape), shape, 3, *small)
    few = ("--max_steps", "25", "--orchestrator.batch_size", "64")
    run = run_rl(*ON_POLICY, "--model.path", str(model), *short_words(3), *few)
    assert_learned(run, by=0.08)
    assert max(run.column("trainer", "mismatch_kl")) < 1e-6


@pytest.fixture(scope="module")
def teacher(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the same model after some more, and only right, demonstrations."""
    rows = reverse_text.demonstrations(10_000, seed=1)
    short = ("--max_steps", "250", "--trainer.schedule.decay_steps", "150", "--trainer.optim.lr", "1e-3")
    model = warm_up(tmp_path_factory.mktemp("teacher"), rows, "--model.path", str(warm_model), *short)
    with serving(str(model)) as address:
        yield address


@pytest.mark.parametrize("algorithm", ["opd", "sft"])
def test_distillation(run_rl: RunRl, teacher: str, algorithm: str) -> None:
    chosen = ("--orchestrator.algorithm.type", algorithm, "--orchestrator.algorithm.teacher.base_url", teacher)
    evaluated = ("--orchestrator.eval.at_start", "true", "--orchestrator.eval.at_end", "true")
    run = run_rl("--max_steps", "40", "--trainer.optim.lr", "3e-4", *chosen, *evaluated)
    before, after = run.column("orchestrator", "eval/held-out/avg")
    assert after > before + 0.1, (before, after)


@pytest.fixture(scope="module")
def tool_user(warm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that asks the tool in two conversations of five, gives up in the others, and knows how a tool replies."""
    rows = lookup.demonstrations(10_000, seed=0, giving_up=0.6)
    # To repeat what the tool said was learned by 300 steps from one warmed-up model, from another only by 600.
    roles = ("--max_steps", "800", "--data.train_roles", '["assistant", "tool"]')
    return warm_up(tmp_path_factory.mktemp("tools"), rows, "--model.path", str(warm_model), *roles)


def with_tool(model: Path, values: str) -> tuple[str, ...]:
    env = f'[{{id = "{lookup.__file__}:Lookup", args = {{values = "{values}"}}}}]'
    size = ("--orchestrator.batch_size", "64", "--orchestrator.sampling.max_tokens", "64", "--max_steps", "50")
    # Few long micro-batches: most of what a short one takes are calls, not numbers.
    fast = ("--seq_len", "1024", "--trainer.optim.lr", "2e-4")
    return ("--model.path", str(model), "--orchestrator.envs", env, "--orchestrator.eval.envs", "[]", *size, *fast)


def test_conversations_with_a_tool(rl_flags: list[str], tool_user: Path, tmp_path: Path) -> None:
    run = Run(RunPaths(tmp_path / "run"))

    def rises() -> list[tuple[float, float] | None]:
        return [run.rise_over(5), run.rise_over(5, "turns/mean")]

    def learned(more: float = 0.0) -> bool:
        """It is right more often, and asks the tool more often."""
        return all(rise is not None and rise[1] > rise[0] + 0.2 + more for rise in rises())

    rl_until(learned, *rl_flags, *with_tool(tool_user, lookup.LETTERS), *ON_POLICY)
    assert learned(), rises()
    assert_trainer_agrees_with_engine(run)


def test_echo_learns_to_ask_and_what_is_answered(rl_flags: list[str], tool_user: Path, tmp_path: Path) -> None:
    run = Run(RunPaths(tmp_path / "run"))

    def surprise() -> tuple[float, float]:
        values = run.column("trainer", "loss/ce")
        return median(values[:6]), median(values[-6:])

    def learned(more: float = 0.0) -> bool:
        rise = run.rise_over(6)
        return rise is not None and rise[1] > rise[0] + 0.2 + more and surprise()[1] < (0.7 - more) * surprise()[0]

    rl_until(learned, *rl_flags, *with_tool(tool_user, "ab"), "--orchestrator.algorithm.type", "echo")
    assert learned(), (run.rise_over(6), surprise())
