"""The ledger of a run: where its time went, and what that cost, from the metrics that it has left so far."""

import json
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
from pydantic import ValidationError

from headway.config.cost import CostSettings
from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics

Lines = list[dict[str, Any]]


class Entry(msgspec.Struct, frozen=True):
    """One line: what devices of one side did for so many seconds, and what that cost."""

    who: str
    what: str
    seconds: float
    money: float
    idle: bool = False


class Ledger(msgspec.Struct):
    """All entries of a run. Those of each side add up to `seconds`, the time that the run has taken."""

    run: str
    currency: str
    seconds: float
    steps: int
    device: str
    devices: float
    entries: list[Entry]
    joules: float
    estimated_joules: float
    energy_money: float
    sampled_tokens: float
    trained_tokens: float
    solved: float
    priced: bool

    @property
    def money(self) -> float:
        return sum(entry.money for entry in self.entries) + self.energy_money

    @property
    def idle_money(self) -> float:
        return sum(entry.money for entry in self.entries if entry.idle)

    def rates(self) -> list[tuple[str, float, float]]:
        """Return the cost per unit: what, money, joules. Units that there are none of are left out."""
        units = [
            ("step", float(self.steps)),
            ("million tokens sampled", self.sampled_tokens / 1e6),
            ("million tokens trained", self.trained_tokens / 1e6),
            ("solved task", self.solved),
        ]
        return [(name, self.money / count, self.joules / count) for name, count in units if count > 0]


def read_ledger(paths: RunPaths) -> Ledger:
    """Make the ledger of a run, finished or not."""
    trainer, orchestrator, cost = (
        list(read_metrics(paths.metrics / f"{name}.jsonl")) for name in ("trainer", "orchestrator", "cost")
    )
    prices, settings = _settings(paths)
    seconds = _run_seconds(paths, [trainer, orchestrator, cost])
    newest = cost[-1] if cost else {}
    placement = settings.get("placement", {})
    used = {
        "trainer": newest.get("devices/trainer", float(placement.get("trainer_ranks", 1))),
        "engines": newest.get("devices/engines", float(placement.get("engines", 1))),
    }
    on_gpus = bool(newest.get("devices/gpus"))
    hour = prices.gpu_hour if on_gpus else prices.core_hour
    sides = {"trainer": _trainer_seconds(trainer), "engines": _engine_seconds(orchestrator)}
    entries = [
        Entry(who, what, spent, spent * used[who] * hour / 3600, what.startswith("wait"))
        for who, parts in sides.items()
        for what, spent in _filled(parts, seconds).items()
    ]
    joules, guessed = _sum(cost, "energy/joules"), _sum(cost, "energy/estimated_joules")
    if not cost:  # a run without a recorder: both sides busy all the time, at the power that the settings name
        joules = guessed = seconds * sum(used.values()) * (prices.gpu_watts if on_gpus else prices.core_watts)
    finished = [line.get("episodes", 0.0) * (1 - (line.get("errors/share") or 0.0)) for line in orchestrator]
    return Ledger(
        run=paths.root.name,
        currency=prices.currency,
        seconds=seconds,
        steps=len(trainer),
        device="GPU" if on_gpus else "core",
        devices=sum(used.values()),
        entries=entries,
        joules=joules,
        estimated_joules=guessed,
        energy_money=joules / 3.6e6 * prices.kwh,
        sampled_tokens=_sum(orchestrator, "sampled_tokens"),
        trained_tokens=_sum(trainer, "tokens"),
        solved=sum((line.get("pass_rate") or 0.0) * count for line, count in zip(orchestrator, finished, strict=True)),
        priced=bool(hour or prices.kwh),
    )


def _trainer_seconds(lines: Lines) -> dict[str, float]:
    publishing = _sum(lines, "publish_seconds")
    return {
        "training": max(0.0, _sum(lines, "step_seconds") - publishing),
        "publishing weights": publishing,
        "waiting for rollouts": _sum(lines, "wait_seconds"),
    }


def _engine_seconds(lines: Lines) -> dict[str, float]:
    waiting, updating = _sum(lines, "wait_for_trainer_seconds"), _sum(lines, "weights/update_seconds")
    return {
        "sampling": max(0.0, _sum(lines, "step_seconds") - waiting - updating),
        "updating weights": updating,
        "waiting for the trainer": waiting,
    }


def _filled(parts: dict[str, float], seconds: float) -> dict[str, float]:
    """Add what is left of the run's time: starts, checkpoints, evaluations, and steps lost in a crash."""
    spent = sum(parts.values())
    if spent > seconds > 0:  # clocks of two processes differ a little
        parts = {name: value * seconds / spent for name, value in parts.items()}
    return parts | {"starting, checkpoints and the rest": max(0.0, seconds - sum(parts.values()))}


def _run_seconds(paths: RunPaths, processes: list[Lines]) -> float:
    """Add up the attempts of a run. One without an end lasts until now where it goes on, else until its last line."""
    times = [line["time"] for lines in processes for line in lines if line.get("time")]
    newest = max(times, default=0.0)
    record: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        record = json.loads(paths.record.read_text())
    attempts = [one for one in record.get("attempts") or [] if isinstance(one, dict) and one.get("started_at")]
    if not attempts:
        return newest - min(times, default=0.0)
    running = record.get("state") == "running" and time.time() - newest < 60
    last = time.time() if running else newest
    ends = [one.get("ended_at") or max(last, one["started_at"]) for one in attempts]
    return float(sum(end - one["started_at"] for one, end in zip(attempts, ends, strict=True)))


def _settings(paths: RunPaths) -> tuple[CostSettings, dict[str, Any]]:
    """Read the prices of a run and all its settings; defaults where it has none."""
    try:
        settings = tomllib.loads((paths.config / "rl.toml").read_text())
        return CostSettings.model_validate(settings.get("cost", {})), settings
    except (OSError, tomllib.TOMLDecodeError, ValidationError):
        return CostSettings(), {}


def _sum(lines: Lines, name: str) -> float:
    return float(sum(line.get(name) or 0.0 for line in lines))


def ledger_lines(ledger: Ledger) -> Iterator[str]:
    """The ledger as text."""
    energy = f"{ledger.joules / 3.6e6:.4g} kWh"
    share = ledger.estimated_joules / ledger.joules if ledger.joules else 1.0
    how = "measured" if share == 0 else "an estimate" if share == 1 else f"{share:.0%} of it an estimate"
    yield f"{ledger.run}: {ledger.steps} steps in {ledger.seconds:,.0f} s on {ledger.devices:g} {ledger.device}s"
    if not ledger.steps:
        yield "  no step is trained yet: times and costs of steps follow with the first"
    yield f"  energy  {energy} ({how})"
    if ledger.priced:
        yield f"  money   {_money(ledger, ledger.money)}, of it {_money(ledger, ledger.idle_money)} idle"
    else:
        price = "gpu_hour" if ledger.device == "GPU" else "core_hour"
        yield f"  money   no prices: give cost.{price} or cost.kwh"
    yield ""
    for who in dict.fromkeys(entry.who for entry in ledger.entries):
        for entry in (entry for entry in ledger.entries if entry.who == who):
            yield f"  {who:<8} {entry.what:<36} {entry.seconds:>10,.1f} s{_column(ledger, entry.money)}"
        yield f"  {who:<8} {'in all':<36} {ledger.seconds:>10,.1f} s"
    yield ""
    for name, money, joules in ledger.rates():
        yield f"  per {name:<24} {joules:>12,.1f} J{_column(ledger, money)}"


def _money(ledger: Ledger, money: float) -> str:
    return f"{money:,.4g} {ledger.currency}"


def _column(ledger: Ledger, money: float) -> str:
    return f"  {money:>12,.6f} {ledger.currency}" if ledger.priced else ""
