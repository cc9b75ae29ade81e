"""Counts since the last step, as the metrics of one line."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from headway.algorithms.base import Group
from headway.core.episodes import Episode, Trace
from headway.core.protocol import WeightReply
from headway.orchestrator.groups.ready import ReadyGroup
from headway.orchestrator.untrained import UntrainedEpisodes

PASSED = 1.0 - 1e-6
"""Reward from which on an episode counts as solved."""


def passed(episode: Episode) -> bool:
    return episode.error is None and episode.reward >= PASSED


class StepTally:
    """Counts between two steps. Rewards are of all finished groups, also of those that filters then drop."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start to count anew."""
        self.dropped: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.cancelled: Counter[str] = Counter()
        self.samples_dropped: Counter[str] = Counter()
        self.rewards: defaultdict[str, list[float]] = defaultdict(list)
        self.solved = 0
        self.episodes = 0
        self.sampled_tokens = 0
        self.expert_bytes, self.expert_tokens = 0, 0
        self.lengths: list[int] = []
        self.turns: list[int] = []
        self.truncated = 0
        self.wait_seconds = 0.0
        self.in_flight: list[int] = []
        self.updates: list[WeightReply] = []
        self.reward_parts: defaultdict[str, list[float]] = defaultdict(list)
        self.env_metrics: defaultdict[str, list[float]] = defaultdict(list)
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.untrained = UntrainedEpisodes()

    def saw_episode(self, episode: Episode) -> None:
        self.episodes += 1
        if episode.error is not None:
            self.errors[episode.error.kind] += 1
            if episode.error.kind != "cancelled":
                self.untrained.add("failed", episode.env, [episode])
        for name, seconds in episode.timings.items():
            self.seconds[name].append(seconds)
        for trace in episode.traces:
            self.sampled_tokens += _sampled(trace)
            records = [node.routed_experts for node in trace.nodes if node.routed_experts is not None]
            self.expert_bytes += sum(len(record.data) for record in records)
            self.expert_tokens += sum(record.shape[0] for record in records)

    def saw_group(self, group: Group) -> None:
        for rollout in group.rollouts:
            episode = rollout.episode
            self.rewards[group.env].append(episode.reward)
            self.solved += passed(episode)
            for trace in episode.traces:
                self.lengths.append(_sampled(trace))
                self.turns.append(sum(node.sampled for node in trace.nodes))
                self.truncated += trace.truncated
                for name, value in trace.rewards.items():
                    self.reward_parts[f"{group.env}/{name}"].append(value)
                for name, value in trace.metrics.items():
                    self.env_metrics[f"{group.env}/{name}"].append(value)

    def saw_dropped(self, cause: str, group: Group) -> None:
        """Count a whole group that is not trained."""
        self.dropped[cause] += len(group.rollouts)
        self.untrained.add(cause, group.env, [rollout.episode for rollout in group.rollouts])

    def mean_in_flight(self, now: int) -> float:
        return float(np.mean([*self.in_flight, now]))

    def values(self, seconds: float) -> dict[str, float]:
        """Return the metrics of the step that took `seconds`."""
        every = [reward for rewards in self.rewards.values() for reward in rewards]
        out = {
            "tokens_per_second": self.sampled_tokens / seconds if seconds > 0 else 0.0,
            "sampled_tokens": float(self.sampled_tokens),
            "episodes": float(self.episodes),
            "wait_for_trainer_seconds": self.wait_seconds,
            "step_seconds": seconds,
            **_summary("reward", every),
            **_summary("length", self.lengths),
            **_summary("turns", self.turns),
            **{f"reward/{env}/mean": float(np.mean(rewards)) for env, rewards in self.rewards.items()},
            **{f"rewards/{name}": float(np.mean(values)) for name, values in self.reward_parts.items()},
            **{f"env/{name}": float(np.mean(values)) for name, values in self.env_metrics.items()},
            **{f"episode_seconds/{name}": float(np.mean(values)) for name, values in self.seconds.items()},
        }
        # A batch may be formed of what was there already; then there is nothing to say about new episodes.
        if every:
            out["pass_rate"] = self.solved / len(every)
        starts = [sum(values) for name, values in self.env_metrics.items() if name.endswith("/sandbox_starts")]
        if starts and seconds > 0:
            out["sandboxes/starts_per_second"] = sum(starts) / seconds
        if self.expert_tokens:
            out["routed_experts/bytes_per_token"] = self.expert_bytes / self.expert_tokens
        if self.turns:
            out["truncated"] = self.truncated / len(self.turns)
        started = max(1, self.episodes)
        for prefix, counts in (("dropped", self.dropped), ("errors", self.errors), ("cancelled", self.cancelled)):
            out[f"{prefix}/share"] = sum(counts.values()) / started
            out |= {f"{prefix}/{cause}": float(count) for cause, count in counts.items()}
        out |= {f"samples_dropped/{cause}": float(count) for cause, count in self.samples_dropped.items()}
        if self.updates:
            out["weights/update_seconds"] = max(reply.seconds for reply in self.updates)
            out["weights/bytes"] = float(sum(reply.bytes for reply in self.updates))
        return out


def batch_values(groups: Sequence[ReadyGroup], step: int) -> dict[str, float]:
    """Return the metrics of a batch: its lag and its size."""
    lags = [group.lags(step) for group in groups for _ in range(group.episodes)]
    total = [in_flight + in_queue for in_flight, in_queue in lags]
    return {
        "lag/mean": float(np.mean(total)),
        "lag/max": float(max(total)),
        "lag/in_flight_mean": float(np.mean([in_flight for in_flight, _ in lags])),
        "lag/in_flight_max": float(max(in_flight for in_flight, _ in lags)),
        "lag/in_queue_mean": float(np.mean([in_queue for _, in_queue in lags])),
        "lag/in_queue_max": float(max(in_queue for _, in_queue in lags)),
        "batch/episodes": float(len(lags)),
        "batch/groups": float(len(groups)),
        "batch/samples": float(sum(len(group.samples) for group in groups)),
        "batch/tokens": float(sum(len(sample) for group in groups for sample in group.samples)),
    }


def _summary(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    low, middle, high = np.quantile(values, (0.1, 0.5, 0.9))
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/p10": float(low),
        f"{name}/p50": float(middle),
        f"{name}/p90": float(high),
        f"{name}/max": float(np.max(values)),
    }


def _sampled(trace: Trace) -> int:
    return sum(len(node.token_ids) for node in trace.nodes if node.sampled)
