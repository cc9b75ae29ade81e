"""Run folders made by hand, in the formats that the processes write."""

import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.base.files import write_atomic
from headway.core.episodes import Episode, EpisodeError, Node, Task, Trace
from headway.core.images import MessageImage
from headway.core.messages import Message, Tool, ToolCall
from headway.core.records import TrainedLogprobs, TrainedSample
from headway.core.runs import RunPaths
from headway.core.samples import BranchKey
from headway.core.wire import encode

BEGAN = 1_794_700_000.0
TOKENS = [257, 266, 103, 257, 267, 0, 1, 2, 3, 4]
LOGPROBS = [-0.1, -2.0, -0.01, -4.0, -0.3]
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'><b>bold</b> \u202egnp.exe"


def make_run(root: Path, name: str = "made", steps: int = 30, **record: Any) -> Path:
    folder = root / name
    for part in ("metrics", "rollouts", "logs", "config"):
        (folder / part).mkdir(parents=True)
    about = {
        "command": "rl",
        "argv": ["rl", "--max_steps", str(steps)],
        "started_at": BEGAN,
        "host": "elsewhere",
        "pid": 1,
    }
    (folder / "run.json").write_text(json.dumps(about | record))
    (folder / "config" / "rl.toml").write_text(
        f'max_steps = {steps}\nseed = 0\n[model]\npath = "nowhere"\n[[orchestrator.envs]]\nid = "reverse-text"\n'
    )
    for step in range(1, steps + 1):
        add_step(folder, step)
    return folder


def add_step(folder: Path, step: int) -> None:
    """What trainer and orchestrator write for a step."""
    at = BEGAN + 10 * step
    append(
        folder / "metrics" / "trainer.jsonl",
        {
            "step": step,
            "time": at,
            "loss": 1.0 / step,
            "entropy": 0.5,
            "grad_norm": 0.1 * step,
            "mismatch_kl": 1e-4 * step,
            "step_seconds": 6.0,
            "wait_seconds": 3.0,
            "publish_seconds": 0.5,
            "tokens_per_second": 1000.0,
            "peak_memory_gib": 0.4,
        },
    )
    append(
        folder / "metrics" / "orchestrator.jsonl",
        {
            "step": step,
            "time": at - 4.0,
            "reward/mean": step / 100,
            "reward/p10": 0.0,
            "reward/p90": 1.0,
            "lag/mean": 1.5,
            "tokens_per_second": 500.0,
            "step_seconds": 9.0,
            "wait_for_trainer_seconds": 2.0,
            "in_flight": 64.0,
            "errors/timeout": float(step % 3),
            "weights/update_seconds": 0.2,
            "episode_seconds/engine": 1.5,
            "episode_seconds/environment": 0.5,
            "workers/serving": 2.0,
            "workers/lost": float(step == 7),
        },
    )


def append(path: Path, values: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")


def write_rollouts(folder: Path, step: int, records: Sequence[dict[str, Any]]) -> None:
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    write_atomic(folder / "rollouts" / f"step_{step:06d}.jsonl.gz", gzip.compress(lines, mtime=0))


def write_logprobs(folder: Path, step: int, apart: float) -> None:
    """What a trainer writes whose logprobs of every token of `rollout` are higher than the engine's by `apart`."""
    sample = TrainedSample(BranchKey("e", 0, 2), [(5, 5)], np.array(LOGPROBS, dtype=np.float32) + np.float32(apart))
    write_atomic(RunPaths(folder).trained_logprobs(step, 0), encode(TrainedLogprobs(step, [sample])))


def rollout(
    step: int, reward: float = 1.0, env: str = "reverse-text", group: str = "aaaaaaaa11", say: str = "dqag",
    error: str | None = None, calls: tuple[ToolCall, ...] = (), task: str = "gaqd", tools: tuple[Tool, ...] = (),
    images: tuple[MessageImage, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    nodes = [
        Node(-1, TOKENS[:3], Message("user", "turn gaqd around", images=images)),
        Node(0, TOKENS[3:5]),
        Node(1, TOKENS[5:], Message("assistant", say, calls), LOGPROBS, [(3, 2), (4, 3)], None, "stop"),
    ]
    failed = EpisodeError(error, "it did not answer") if error else None  # type: ignore[arg-type]
    episode = Episode(
        id="e", group_id=group, env=env, task=Task(task, {}), version=3, error=failed, started_at=time.time(),
        traces=[Trace(nodes=nodes, reward=reward, rewards={"exact": reward}, tools=list(tools))],
        timings={"total": 0.9},
    )  # fmt: skip
    sample = {"agent": "policy", "tokens": 10, "sampled": 5, "advantage": reward - 0.5, "leaf": 2}
    return {
        "step": step,
        "env": env,
        "group": group,
        "reward": reward,
        "lag": 1,
        "episode": msgspec.to_builtins(episode),
        "samples": [sample],
    }
