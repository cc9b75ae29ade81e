"""Verification of contributions before they are trained on: cheap checks first, the trusted model last."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from headway.base.errors import UsageError
from headway.core.episodes import Episode, Node
from headway.models.decoder import DecoderLM
from headway.swarm.messages.orders import Contribution, Precision, WorkOrder
from headway.swarm.messages.verdict import Verdict
from headway.swarm.trust.checks.activations import Activations
from headway.swarm.trust.checks.base import Check, Claim, Evidence, PlayedClaim
from headway.swarm.trust.checks.numbers import Logprobs, Ranks, SeededDraws
from headway.swarm.trust.checks.replay import PlayedAgain
from headway.swarm.trust.play import Replayer
from headway.swarm.trust.rescore import rescore_all
from headway.swarm.trust.rescored import Rescored

Case = TypeVar("Case", bound=Claim)
ModelOf = Callable[[int, Precision], DecoderLM]
"""Returns the trusted model of a version, in the precision that a worker computed in."""

LONGEST_REASON = 300


class Verifier:
    """Decides on contributions. `light` checks need neither model nor environment.

    Every contribution is played again, and the episodes that come of that are those to train on: nothing of a
    stranger's enters them except tokens and logprobs. The model computes them again where `rescored` is asked for.
    """

    def __init__(
        self,
        light: Sequence[Check[Claim]],
        player: Replayer,
        model_of: ModelOf,
        numbers: Sequence[Check[Evidence]] | None = None,
    ) -> None:
        if not player.repeats:
            raise UsageError(
                "a swarm needs an environment that repeats itself (resumable = True), to compute rewards again"
            )
        self._light, self._player, self._model_of = light, player, model_of
        self._replay: Sequence[Check[PlayedClaim]] = (PlayedAgain(),)
        self._numbers = numbers if numbers is not None else (Logprobs(), SeededDraws(), Ranks(), Activations())

    async def verify(
        self, order: WorkOrder, contribution: Contribution, *, rescored: bool
    ) -> tuple[Verdict, list[Episode]]:
        """Return the verdict, and the episodes to train on: none where it is a refusal."""
        if refusal := first_refusal(self._light, Claim(order, contribution)):
            return refusal, []
        tokens = sum(len(node.token_ids) for episode in contribution.episodes for node in sampled_nodes(episode))
        played = await asyncio.gather(
            *(
                self._player.play_again(order.request(index), episode, order.context)
                for index, episode in enumerate(contribution.episodes)
            )
        )
        if refusal := first_refusal(self._replay, PlayedClaim(order, contribution, played)):
            return msgspec.structs.replace(refusal, tokens=tokens), []
        if rescored:
            again = await asyncio.to_thread(self._rescore, order, contribution)
            if refusal := first_refusal(self._numbers, Evidence(order, contribution, played, again)):
                return msgspec.structs.replace(refusal, tokens=tokens, rescored=True), []
        return Verdict(True, rescored=rescored, tokens=tokens), played

    def _rescore(self, order: WorkOrder, contribution: Contribution) -> Rescored:
        return rescore_contribution(self._model_of(order.version, contribution.precision), order, contribution)


def rescore_contribution(model: DecoderLM, order: WorkOrder, contribution: Contribution) -> Rescored:
    """Compute all sampled tokens of a contribution again."""
    pairs = zip(order.seeds, contribution.episodes, strict=True)
    traces = [(trace, seed) for seed, episode in pairs for trace in episode.traces]
    return rescore_all(model, traces, order.sampling.temperature)


def first_refusal(checks: Sequence[Check[Case]], case: Case) -> Verdict | None:
    for check in checks:
        if reason := check.refuse(case):
            # Reasons quote strangers, and the ledger keeps them.
            return Verdict(False, check.name, reason[:LONGEST_REASON])
    return None


def sampled_nodes(episode: Episode) -> list[Node]:
    return [node for trace in episode.traces for node in trace.nodes if node.sampled]
