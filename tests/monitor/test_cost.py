"""The cost of a run: meters, the line of every step, and a ledger whose entries add up to the run's time."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.cli import main
from headway.config.cost import CostSettings
from headway.core.runs import RunPaths
from headway.monitor.cost.ledger import read_ledger
from headway.monitor.cost.meters import CoreEstimate, NvmlMeter, RaplMeter, core_meter, gpu_meter
from headway.monitor.cost.recorder import CostRecorder, Devices, split_devices
from headway.monitor.metrics import read_metrics

BEGAN = 1_794_700_000.0


class Counters:
    """The functions of pynvml that a meter calls, with counters of one's own. It cannot tell what a driver does."""

    def __init__(self) -> None:
        self.millijoules = {"0": 5000, "1": 7000, "GPU-x": 100}

    def nvmlInit(self) -> None:  # noqa: N802 - the names are pynvml's
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return str(index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        return self.millijoules[handle]


def test_counters_of_gpus_are_added_from_when_the_meter_was_made() -> None:
    counters = Counters()
    meter = NvmlMeter(counters, ["1", "GPU-x"])
    counters.millijoules |= {"0": 9000, "1": 8000, "GPU-x": 600}
    assert meter.measured and meter.joules() == pytest.approx(1.5)


def rapl(root: Path, name: str, domain: str, microjoules: int) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{domain}\n")
    (folder / "max_energy_range_uj").write_text("999999\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def test_counters_of_processors_wrap_around_and_their_parts_are_not_counted_twice(tmp_path: Path) -> None:
    counter = rapl(tmp_path, "intel-rapl:0", "package-0", 900_000)
    rapl(tmp_path, "intel-rapl:0:0", "core", 1)
    meter = RaplMeter(tmp_path)
    counter.write_text("950000")
    assert meter.joules() == pytest.approx(0.05)
    counter.write_text("150000")
    assert meter.joules() == pytest.approx(0.25)


def test_without_counters_there_is_an_estimate_that_says_so(tmp_path: Path) -> None:
    assert isinstance(core_meter(8.0, tmp_path), CoreEstimate)
    assert not core_meter(8.0, tmp_path).measured
    assert not gpu_meter(["no such GPU"], 500.0).measured


def test_the_estimate_counts_processes_that_have_ended_since() -> None:
    meter = CoreEstimate(10.0)
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "done\n"
    before = meter.joules()
    child.communicate("\n")
    assert 2.0 <= before <= meter.joules()


def test_gpus_that_are_shared_are_paid_once() -> None:
    assert split_devices(["0", "1"], [["2"], ["3"]], 2, 64) == Devices(2, 2, ("0", "1", "2", "3"))
    assert split_devices(["0"], [["0"]], 1, 64) == Devices(0.5, 0.5, ("0",))
    assert split_devices([], [[], [], []], 1, 8) == Devices(2, 6)


def test_every_step_gets_a_line_and_lines_of_earlier_attempts_none(tmp_path: Path) -> None:
    recorder = CostRecorder(RunPaths(tmp_path), CostSettings(core_hour=3600, kwh=3.6e6), Devices(1, 3))
    recorder.update("trainer", {"step": 1, "time": time.time() - 100, "wait_seconds": 50.0})
    recorder.update("orchestrator", {"step": 2, "time": time.time() + 1, "wait_for_trainer_seconds": 0.5})
    recorder.update("trainer", {"step": 2, "time": time.time() + 1, "wait_seconds": 2.0})
    recorder.close()
    step, rest = read_metrics(tmp_path / "metrics" / "cost.jsonl")
    assert (step["step"], step["money/trainer_waiting"], step["money/engines_waiting"]) == (2, 2.0, 1.5)
    assert step["money"] == pytest.approx(4 * step["seconds"] + step["energy/joules"])
    assert step["energy/estimated_joules"] in (0.0, step["energy/joules"])
    assert rest["money/trainer_waiting"] == 0.0


def test_a_run_without_any_step_leaves_no_line(tmp_path: Path) -> None:
    CostRecorder(RunPaths(tmp_path), CostSettings(), Devices(1, 1)).close()
    assert (tmp_path / "metrics" / "cost.jsonl").read_text() == ""


def made_run(root: Path, *, prices: str = "core_hour = 3.6", cost: bool = True, **record: object) -> RunPaths:
    """A run of ten steps that took 100 s, of 10 s each: 6 s of training, 3 s of waiting, and a start."""
    paths = RunPaths(root / "made")
    paths.metrics.mkdir(parents=True)
    paths.config.mkdir()
    paths.record.write_text(json.dumps({"attempts": [{"started_at": BEGAN, "ended_at": BEGAN + 130.0}], **record}))
    (paths.config / "rl.toml").write_text(f"[placement]\ntrainer_ranks = 2\nengines = 3\n[cost]\n{prices}\n")
    for step in range(1, 11):
        at = BEGAN + 20 + 10 * step
        lines = {
            "trainer": {"step_seconds": 6.0, "publish_seconds": 1.0, "wait_seconds": 3.0, "tokens": 2e5},
            "orchestrator": {
                "step_seconds": 10.0,
                "wait_for_trainer_seconds": 2.0,
                "weights/update_seconds": 0.5,
                "sampled_tokens": 1e5,
                "episodes": 50.0,
                "errors/share": 0.2,
                "pass_rate": 0.5,
            },
            "cost": {
                "energy/joules": 3600.0,
                "energy/estimated_joules": 0.0,
                "devices/trainer": 1.0,
                "devices/engines": 4.0,
                "devices/gpus": 0.0,
            },
        }
        for name, values in lines.items():
            if cost or name != "cost":
                with (paths.metrics / f"{name}.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "time": at, **values}) + "\n")
    return paths


def test_entries_of_each_side_add_up_to_the_time_of_the_run(tmp_path: Path) -> None:
    ledger = read_ledger(made_run(tmp_path))
    assert ledger.seconds == 130.0
    found = {(entry.who, entry.what): entry for entry in ledger.entries}
    for who in ("trainer", "engines"):
        assert sum(entry.seconds for (side, _), entry in found.items() if side == who) == pytest.approx(130.0)
    assert found["trainer", "training"].seconds == pytest.approx(50.0)
    assert found["trainer", "waiting for rollouts"].seconds == pytest.approx(30.0)
    assert found["engines", "waiting for the trainer"].seconds == pytest.approx(20.0)
    # 5 cores for 130 s at 3.6 an hour, and of that 1 core for 30 s and 4 cores for 20 s idle
    assert ledger.money == pytest.approx(0.65)
    assert ledger.idle_money == pytest.approx(0.03 + 0.08)
    rates = {name: (money, joules) for name, money, joules in ledger.rates()}
    assert rates["step"] == pytest.approx((0.065, 3600.0))
    assert rates["million tokens sampled"] == pytest.approx((0.65, 36000.0))
    assert rates["million tokens trained"] == pytest.approx((0.325, 18000.0))
    assert rates["solved task"] == pytest.approx((0.65 / 200, 180.0))


def test_time_between_attempts_costs_nothing_and_a_dead_attempt_ends_with_its_last_line(tmp_path: Path) -> None:
    attempts = [{"started_at": BEGAN - 500, "ended_at": BEGAN - 400}, {"started_at": BEGAN}]
    assert read_ledger(made_run(tmp_path, attempts=attempts, state="running")).seconds == pytest.approx(220.0)


def test_a_run_without_a_recorder_gets_an_estimate(tmp_path: Path) -> None:
    ledger = read_ledger(made_run(tmp_path, cost=False))
    assert ledger.devices == 5.0
    assert ledger.joules == ledger.estimated_joules == pytest.approx(130 * 5 * CostSettings().core_watts)


def test_the_command_prints_energy_money_and_who_waited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = made_run(tmp_path, prices='core_hour = 3.6\ncurrency = "EUR"')
    assert main.run(["cost", str(paths.root)]) == 0
    printed = capsys.readouterr().out
    assert "0.01 kWh (measured)" in printed and "0.65 EUR, of it 0.11 EUR idle" in printed
    assert "waiting for rollouts" in printed and "per solved task" in printed
    (paths.config / "rl.toml").unlink()
    assert main.run(["cost", str(paths.root)]) == 0
    assert "no prices" in capsys.readouterr().out
