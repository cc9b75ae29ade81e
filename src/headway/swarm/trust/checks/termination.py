"""The ends of replies: a reply stops at an end token, and only there, or at its longest length."""

from collections.abc import Collection

from headway.core.episodes import Trace
from headway.swarm.messages.orders import WorkOrder
from headway.swarm.trust.checks.base import Claim


class Termination:
    """Refuses replies that were cut short, or went on after an end token. `stops` are the ids of end tokens. For
    contributions of the right form."""

    name = "termination"

    def __init__(self, stops: Collection[int]) -> None:
        self._stops = frozenset(stops)

    def refuse(self, claim: Claim) -> str | None:
        reasons = (self._refuse_trace(claim.order, trace) for e in claim.contribution.episodes for trace in e.traces)
        return next((reason for reason in reasons if reason), None)

    def _refuse_trace(self, order: WorkOrder, trace: Trace) -> str | None:
        stops = self._stops | frozenset(order.sampling.stop_token_ids)
        lengths: list[int] = []
        for node in trace.nodes:
            lengths.append(len(node.token_ids) + (lengths[node.parent] if node.parent >= 0 else 0))
            if not node.sampled:
                continue
            ended = bool(node.token_ids) and node.token_ids[-1] in stops
            if any(token in stops for token in node.token_ids[:-1]):
                return "a reply goes on after an end token"
            if node.finish_reason != ("stop" if ended else "length"):
                return f"a reply claims to have ended by {node.finish_reason!r}"
            if not ended and len(node.token_ids) != order.sampling.max_tokens and lengths[-1] != order.context:
                return f"a reply was cut short after {len(node.token_ids)} tokens"
        return None
