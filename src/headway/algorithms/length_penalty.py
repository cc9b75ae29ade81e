"""A linear penalty on length: what a trace wrote, read and took turns for, relative to the group's largest."""

from collections.abc import Sequence

from headway.config.algorithms import LengthPenalty
from headway.core.episodes import Trace


def penalized_rewards(traces: Sequence[Trace], penalty: LengthPenalty | None) -> list[float]:
    """reward − mean reward · (output·out/max_out + input·in/max_in + turns·turns/max_turns), over these traces."""
    rewards = [trace.reward for trace in traces]
    if penalty is None or not traces:
        return rewards
    scale = sum(rewards) / len(rewards)
    written = [sum(len(n.token_ids) for n in trace.nodes if n.sampled) for trace in traces]
    read = [sum(len(n.token_ids) for n in trace.nodes if not n.sampled) for trace in traces]
    turns = [sum(n.sampled for n in trace.nodes) for trace in traces]
    shares = zip(_relative(written), _relative(read), _relative(turns), strict=True)
    return [
        reward - scale * (penalty.output * out + penalty.input * into + penalty.turns * turn)
        for reward, (out, into, turn) in zip(rewards, shares, strict=True)
    ]


def _relative(values: Sequence[int]) -> list[float]:
    largest = max(values)
    return [value / largest if largest else 0.0 for value in values]
