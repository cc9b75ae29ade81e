"""Scores of an evaluation: avg@k, the mean reward over k samples a task, and pass@k (https://arxiv.org/abs/2107.03374)."""

from collections.abc import Sequence
from math import comb
from typing import Any

import msgspec

from headway.core.episodes import Episode, Task
from headway.orchestrator.tally import passed


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Estimate without bias the chance that at least one of k samples solves a task, from `solved` of `samples`."""
    return 1.0 - comb(samples - solved, k) / comb(samples, k)


def summarize(tasks: Sequence[Sequence[Episode]]) -> dict[str, float]:
    """Score the episodes `tasks[t]` of each task t. An episode that failed has reward 0 and solves nothing."""
    episodes = [episode for samples in tasks for episode in samples]
    if not episodes:
        return {}
    traces = [trace for episode in episodes for trace in episode.traces]
    lengths = [sum(len(node.token_ids) for node in trace.nodes if node.sampled) for trace in traces]
    out = {
        "avg": sum(_reward(episode) for episode in episodes) / len(episodes),
        "errors": sum(episode.error is not None for episode in episodes) / len(episodes),
        "length": sum(lengths) / max(1, len(lengths)),
        "truncated": sum(trace.truncated for trace in traces) / max(1, len(traces)),
        "episodes": float(len(episodes)),
    }
    k, fewest = 1, min(len(samples) for samples in tasks)
    while k <= fewest:
        chances = [pass_at_k(len(samples), sum(map(passed, samples)), k) for samples in tasks]
        out[f"pass@{k}"] = sum(chances) / len(chances)
        k *= 2
    return out


def task_record(task: Task, samples: Sequence[Episode]) -> dict[str, Any]:
    """Return one line of an evaluation's file. `messages` is the conversation of the first sample, for readers."""
    return {
        "task": task.id,
        "rewards": [_reward(episode) for episode in samples],
        "passed": [passed(episode) for episode in samples],
        "errors": [f"{episode.error.kind}: {episode.error.message}" for episode in samples if episode.error],
        "versions": sorted({v for e in samples for t in e.traces for n in t.nodes for v, _ in n.versions}),
        "seconds": [episode.timings.get("total", 0.0) for episode in samples],
        "replies": [_reply(episode) for episode in samples],
        "messages": _messages(samples[0]) if samples else [],
    }


def _reward(episode: Episode) -> float:
    return 0.0 if episode.error is not None else episode.reward


def _messages(episode: Episode) -> list[dict[str, Any]]:
    """Return what the first agent saw and said."""
    nodes = episode.traces[0].nodes if episode.traces else []
    return [msgspec.to_builtins(node.message) for node in nodes if node.message is not None]


def _reply(episode: Episode) -> str:
    """Return the last thing the first agent said."""
    nodes = episode.traces[0].nodes if episode.traces else []
    return next((n.message.content for n in reversed(nodes) if n.sampled and n.message is not None), "")
