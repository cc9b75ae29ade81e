"""Small groups by hand: episodes of given rewards, lengths and agents, with their samples."""

from collections.abc import Sequence

from headway.algorithms.base import Group, Rollout
from headway.core.episodes import Episode, Node, Task, Trace
from headway.core.messages import Message
from headway.envs.samples import episode_samples


def make_trace(
    reward: float, *, agent: str = "policy", prompt: int = 2, reply: int = 3, turns: int = 1, problem: str | None = None
) -> Trace:
    """`turns` times a prompt and a reply, one after the other."""
    nodes = []
    for turn in range(turns):
        role = "user" if turn == 0 else "tool"
        nodes.append(Node(len(nodes) - 1, list(range(prompt)), Message(role, "?")))  # type: ignore[arg-type]
        nodes.append(
            Node(len(nodes) - 1, list(range(10, 10 + reply)), Message("assistant", "!"), [-0.5] * reply, [(4, reply)])
        )
    return Trace(agent, nodes, reward, problem=problem)


def make_group(*episodes: Trace | Sequence[Trace], task: Task | None = None) -> Group:
    task = task or Task("t")
    rollouts = []
    for index, traces in enumerate(episodes):
        several = [traces] if isinstance(traces, Trace) else list(traces)
        episode = Episode(f"g.{index}", "g", "env", task, version=4, traces=several)
        rollouts.append(Rollout(episode, episode_samples(episode)))
    return Group("g", "env", task, rollouts)


def advantages_of(group: Group) -> list[float]:
    """The advantage of each sample, after checking that it lies on the sampled tokens and nowhere else."""
    found = []
    for _, sample in group.samples():
        on = set(sample.advantages[sample.sampled].tolist())
        assert len(on) == 1, "one advantage for all sampled tokens"
        assert not sample.advantages[~sample.sampled].any()
        assert (sample.rl_weight == sample.sampled).all()
        assert not sample.ce_weight.any() and not sample.ref_kl_weight.any()
        found.append(on.pop())
    return found
