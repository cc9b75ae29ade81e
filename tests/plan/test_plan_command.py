"""`headway plan` on settings, on a run's records, and on what cannot be planned."""

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.cli.main import run
from headway.config.loader import load_settings, write_settings
from headway.config.rl import RlSettings
from headway.core.episodes import Episode, Node, Task, Trace
from headway.core.records import RolloutRecord, SampleRecord, write_rollouts
from headway.core.runs import RunPaths
from headway.plan import calibration
from headway.plan.calibration import Calibration
from headway.plan.episodes import Turn, recorded_shape, recorded_workload
from headway.plan.measuring import EngineFigures, TrainerFigures, fit_line

EXAMPLE = Path(__file__).parents[2] / "examples" / "reverse_text" / "rl.toml"
SMALL = ("--orchestrator.batch_size", "16", "--orchestrator.group_size", "8", "--orchestrator.max_lag", "1")
SETTINGS = ("@", str(EXAMPLE), *SMALL)
SHORT = ("--prompt-tokens", "30", "--reply-tokens", "12")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate as little as a forecast can be made of: these tests are about what is said of it."""
    monkeypatch.setattr("headway.plan.forecast.MOST_STEPS", 5)


@pytest.fixture
def measured_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which the example's model has been measured."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "usable_cores", lambda: 2)
    settings = load_settings(RlSettings, SETTINGS).settings
    engine = EngineFigures(0.001, 0.0001, 0.0, 0.0001, 0.0005, 100_000)
    known = Calibration(
        calibration._key(settings), "tiny", "cpu", 2, 1, engine, TrainerFigures(0.05, 0.0005, 0.01), time.time()
    )
    calibration.calibration_file().write_bytes(msgspec.json.encode([known]))
    return tmp_path


def make_run(folder: Path, steps: int = 8, step_seconds: float = 1.5) -> RunPaths:
    """Records of a run whose trainer was always busy: 16 episodes a step, of 40 tokens each."""
    paths = RunPaths(folder / "past")
    for part in (paths.config, paths.metrics, paths.rollouts):
        part.mkdir(parents=True)
    paths.record.write_text("{}")
    write_settings(load_settings(RlSettings, SETTINGS).settings, paths.config / "rl.toml")
    trainer, orchestrator = [], []
    for step in range(1, steps + 1):
        line = {"step": step, "time": 1000.0 + step * step_seconds, "publish_seconds": 0.01}
        trainer.append({**line, "step_seconds": step_seconds - 0.001, "tokens": 640})
        orchestrator.append(
            {**line, "step_seconds": step_seconds, "episodes": 20, "dropped/zero_advantage": 4, "lag/mean": 1.0,
             "episode_seconds/engine": 0.05, "weights/update_seconds": 0.01}
        )  # fmt: skip
        write_rollouts(paths, step, [record(step, number) for number in range(16)])
    for name, lines in (("trainer", trainer), ("orchestrator", orchestrator)):
        (paths.metrics / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


def record(step: int, number: int) -> RolloutRecord:
    nodes = [
        Node(-1, [1] * 20),
        Node(0, [2] * 6, logprobs=[0.0] * 6),
        Node(1, [3] * 8),
        Node(2, [4] * 6, logprobs=[0.0] * 6),
    ]
    timings = {"total": 0.25, "engine": 0.05}
    episode = Episode(f"{step}.{number}", "g", "reverse-text", Task("t"), traces=[Trace(nodes=nodes)], timings=timings)
    return RolloutRecord(step, "reverse-text", "g", 1.0, episode, samples=[SampleRecord(tokens=40)])


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert run(["plan", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_gpus_are_split_between_trainer_and_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "plan.svg"
    asked = ("--gpus", "4", "--gpu", "h200", "--cost.gpu_hour", "3.6", "--picture", str(file))
    plan = planned(capsys, *SETTINGS, *SHORT, *asked)
    assert plan["own"] is None and plan["device"] == "H200" and plan["priced"]
    assert all(split["devices"] <= 4 for split in plan["splits"])
    seconds = [split["forecast"]["step_seconds"] for split in plan["splits"]]
    assert plan["fastest"]["forecast"]["step_seconds"] == min(seconds)
    money = [split["money"] for split in plan["splits"]]
    assert plan["cheapest"]["money"] == min(money)
    split = plan["splits"][0]
    assert split["money"] == pytest.approx(split["devices"] * split["forecast"]["step_seconds"] / 1000)
    assert set(plan["memory"]) == {"trainer", "engine"} and plan["memory"]["engine"]["KV"] > 100
    assert {"max_lag 0", "batch_size 32", "one engine more"} <= {change["what"] for change in plan["changes"]}
    assert plan["episodes"]["sampled"] == pytest.approx(12)
    assert f">KV {plan['memory']['engine']['KV']:.1f}<" in file.read_text()


def test_this_machine_is_planned_for_from_what_was_measured(
    measured_machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *SETTINGS, *SHORT, "--turn-seconds", "0.1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("1 trainer rank + 1 engine (2 cores): a step takes ")
    for part in ("bottleneck ", "lag  ", "Splits:", "as in the settings", "If a setting were another:", "Assumed:"):
        assert part in text
    # 16 episodes of 42 tokens, at 0.5 ms each, and 50 ms.
    assert "training: twice as fast would make a step" in text
    assert "busy 0.4" in text


def test_a_run_is_planned_again_from_its_records(measured_machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = make_run(measured_machine)
    workload = recorded_workload(paths)
    assert len(workload.shapes) == 8 * 16 and workload.useful == pytest.approx(0.8)
    shape = recorded_shape(record(1, 0))
    assert shape and shape.turns == (Turn(20, 6, 0.1), Turn(8, 6, 0.1)) and shape.samples == (40,)
    plan = planned(capsys, str(paths.root))
    assert plan["measured"]["step_seconds"] == pytest.approx(1.5)
    assert abs(plan["error"]) < 0.1 and plan["own"] is not None
    assert plan["bottleneck"].startswith("training")
    other = planned(capsys, *SETTINGS, "--from", str(paths.root), "--gpus", "2", "--gpu", "a100")
    assert other["measured"] is None and other["episodes"]["turns"] == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*SETTINGS, "--gpus", "4", "--gpu", "h2000"), "no GPU called 'h2000' is known; known are H200, H100"),
        ((*SETTINGS, "--gpus", "1", "--gpu", "h200"), "--gpus must be 2 at least"),
        ((*SETTINGS, "--gpu", "h200", "--useful-share", "0"), "--useful-share cannot be 0"),
        ((*SETTINGS, "--gpu", "h200", "--reply-tokens", "x"), "--reply-tokens: invalid float value"),
        ((*SETTINGS, "--gpu", "h200", "--picture", "plan.png"), "--picture draws an SVG file; give it a name that"),
        (("--gpu", "h200"), "no environment to plan for"),
        (("nowhere",), "nowhere is not a run folder"),
        ((*SETTINGS, "--gpu", "h200", "--from", "nowhere"), "nowhere is not a run folder"),
        ((*SETTINGS, "--orchestrator.max_lags", "2"), "orchestrator.max_lags"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_line(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *argv]) == 2
    assert message in capsys.readouterr().err


def test_runs_without_records_are_said_to_have_none(measured_machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = make_run(measured_machine, steps=2)
    assert run(["plan", str(paths.root)]) == 2
    assert "has 2 trained steps, a plan needs 4 at least" in capsys.readouterr().err
    for file in paths.rollouts.iterdir():
        file.unlink()
    assert run(["plan", *SETTINGS, "--from", str(paths.root)]) == 2
    assert "has no recorded episodes" in capsys.readouterr().err


def test_lines_are_fitted_without_negative_parts() -> None:
    assert fit_line((1, 8, 32), (3.0, 10.0, 34.0)) == pytest.approx((2.0, 1.0))
    assert fit_line((1, 2, 3), (3.0, 2.0, 1.0)) == pytest.approx((2.0, 0.0))
    assert fit_line((1, 2, 3), (0.0, 2.0, 4.0)) == pytest.approx((0.0, 1.0))
    assert fit_line((4,), (2.0,)) == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize(("device", "slower"), [("cpu", 2.0), ("cuda", 1.0)])
def test_fewer_threads_make_a_cpu_slower_and_not_a_gpu(device: str, slower: float) -> None:
    """With three engines each process has 4 of 16 cores; it was measured with 8, as a run with one engine has them."""
    engine = EngineFigures(0.001, 0.0, 0.0, 0.0001, 0.0, 100_000)
    known = Calibration("", "tiny", device, 16, 8, engine, TrainerFigures(0.05, 0.0005, 0.01), time.time())
    speeds = known.speeds(load_settings(RlSettings, (*SETTINGS, "--placement.engines", "3")).settings)
    assert speeds.engine.step_seconds(1, 1) == pytest.approx(slower * 0.001)
    assert speeds.trainer.slower == slower
