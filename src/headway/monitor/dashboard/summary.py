"""One line of the runs table: what a run is and how far it has come, from the ends of its files only."""

import socket
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from headway.core.runs import RunPaths
from headway.monitor.attempts import ENDED
from headway.monitor.dashboard.logs import restart_count
from headway.monitor.tail import last_lines

FRESH_SECONDS = 180.0
"""A run of another machine counts as running while its metrics are younger than this."""
GONE = "the process that ran it was killed, or its machine went down; continue with --resume"


def summarize(paths: RunPaths) -> dict[str, Any]:
    """Collect name, status, step, reward, speed, age and what to group by. Missing files leave fields empty."""
    record = read_json(paths.record)
    settings = read_settings(paths)
    lines = [_last_metrics(paths, process) for process in ("trainer", "sft", "orchestrator")]
    trainer, sft, orchestrator = map(_latest, lines)
    trained = trainer or sft
    last = trained or orchestrator
    updated = max(float(line.get("time") or 0.0) for line in (trainer, orchestrator, last))
    step, of = int(last.get("step") or 0), _integer(settings.get("max_steps"))
    status, reason = _status(record, int(trained.get("step") or 0), of, updated)
    return {
        "name": paths.root.name,
        "command": _text(record.get("command")),
        "status": status,
        "reason": reason,
        "failed_log": _text(record.get("failed_log")),
        "step": step,
        "max_steps": of,
        "reward": orchestrator.get("reward/mean"),
        "evaluation": next(
            (v for k, v in sorted(orchestrator.items()) if k.endswith("/avg") and k[:5] == "eval/"), None
        ),
        "loss": last.get("loss"),
        "lag": orchestrator.get("lag/mean"),
        "tokens_per_second": trained.get("tokens_per_second"),
        "step_seconds": _step_seconds(*lines),
        "started_at": record.get("started_at"),
        "updated_at": updated or record.get("started_at"),
        "model": _text((settings.get("model") or {}).get("path")),
        "envs": _env_names(settings),
        "algorithm": _text(((settings.get("orchestrator") or {}).get("algorithm") or {}).get("type")),
        "restarts": restart_count(paths.logs, _attempts(record)),
        "host": _text(record.get("host")),
    }


def _attempts(record: dict[str, Any]) -> int:
    """Count how often the run was started or resumed; records of old or foreign runs may not say."""
    attempts = record.get("attempts")
    return max(1, len(attempts)) if isinstance(attempts, list) else 1


def read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def read_settings(paths: RunPaths) -> dict[str, Any]:
    """Read the resolved settings of the run's command, or of the first process that wrote any."""
    for name in ("rl", "sft", "host", "train", "trainer", "orchestrate", "orchestrator"):
        try:
            return tomllib.loads((paths.config / f"{name}.toml").read_text("utf-8"))
        except (OSError, ValueError):
            continue
    return {}


def _last_metrics(paths: RunPaths, process: str) -> list[dict[str, float | None]]:
    """Decode the last lines of a process's metrics."""
    found = []
    for line in last_lines(paths.metrics / f"{process}.jsonl"):
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):
            found.append(msgspec.json.decode(line, type=dict[str, float | None]))
    return found


def _latest(lines: list[dict[str, float | None]]) -> dict[str, Any]:
    """Merge lines into the newest value of every name, and the newest step and time."""
    merged: dict[str, Any] = {}
    for values in lines:
        step = max(merged.get("step") or 0, values.get("step") or 0)
        merged |= values | {"step": step}
    return merged


def _step_seconds(*processes: list[dict[str, float | None]]) -> float | None:
    """Return the seconds between the last steps of the first process that has several."""
    for lines in processes:
        times = [(line["step"] or 0.0, line["time"] or 0.0) for line in lines if "step" in line and "time" in line]
        if len(times) > 1 and times[-1][0] > times[0][0]:
            return (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])
    return None


def _status(record: dict[str, Any], trained: int, of: int | None, updated: float) -> tuple[str, str]:
    """Return the run's state with its reason: the recorded one, unless nobody was left to record the end."""
    state = _text(record.get("state"))
    if state in ENDED:
        return state, _text(record.get("reason"))
    attempts = record.get("attempts")
    newest = attempts[-1] if isinstance(attempts, list) and attempts and isinstance(attempts[-1], dict) else record
    here = newest.get("host") == socket.gethostname()
    if here and _alive(newest):
        return "running", ""
    if state == "running" and here:
        return "failed", GONE
    if state not in ("starting", "running") and of is not None and trained >= of:  # a run before states were recorded
        return "finished", ""
    return ("running" if time.time() - updated < FRESH_SECONDS else "stopped"), ""


def _alive(record: dict[str, Any]) -> bool:
    """Tell whether the process that began the run still lives, and is not another one with its id."""
    try:
        began = psutil.Process(int(record["pid"])).create_time()
    except (psutil.Error, KeyError, TypeError, ValueError, OverflowError):
        return False
    return bool(began <= float(record.get("started_at") or 0.0) + 1.0)


def _env_names(settings: dict[str, Any]) -> list[str]:
    envs = (settings.get("orchestrator") or {}).get("envs") or []
    return [_text(env.get("name") or env.get("id")) for env in envs if isinstance(env, dict)]


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
