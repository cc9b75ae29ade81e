"""Verification of contributions before they are trained on: cheap checks first, the trusted model last."""

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from headway.base.errors import UsageError
from headway.core.episodes import Episode, Node
from headway.swarm.messages.orders import Contribution, WorkOrder
from headway.swarm.messages.verdict import Verdict
from headway.swarm.trust.checks.activations import Activations
from headway.swarm.trust.checks.base import Check, Claim, Evidence, PlayedClaim
from headway.swarm.trust.checks.numbers import Logprobs, Ranks, SeededDraws
from headway.swarm.trust.checks.replay import PlayedAgain
from headway.swarm.trust.play import Replayer
from headway.swarm.trust.queue import ModelOf, RescoringQueue

Case = TypeVar("Case", bound=Claim)

LONGEST_REASON = 300


class Verifier:
    """Decides on contributions. `light` checks need neither model nor environment.

    Every contribution is played again, and the episodes that come of that are those to train on: nothing of a
    stranger's enters them except tokens and logprobs. The model computes these again: all of them, or those of one
    episode first, and the others only where something is wrong with it.
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
        self._light, self._player, self._queue = light, player, RescoringQueue(model_of)
        self._replay: Sequence[Check[PlayedClaim]] = (PlayedAgain(),)
        self._numbers = numbers if numbers is not None else (Logprobs(), SeededDraws(), Ranks(), Activations())

    async def verify(
        self, order: WorkOrder, contribution: Contribution, *, spot: int | None
    ) -> tuple[Verdict, list[Episode]]:
        """Return the verdict, and the episodes to train on: none where it is a refusal.

        `spot` is the index of the episode whose tokens are computed again first; with None, all are.
        """
        if refusal := first_refusal(self._light, Claim(order, contribution)):
            return refusal, []
        tokens = sum(len(node.token_ids) for episode in contribution.episodes for node in sampled_nodes(episode))
        played = await asyncio.gather(
            *(
                self._player.play_again(order.request(index), episode, order.context)
                for index, episode in enumerate(contribution.episodes)
            )
        )
        claim = PlayedClaim(order, contribution, played)
        if refusal := first_refusal(self._replay, claim):
            return msgspec.structs.replace(refusal, tokens=tokens), []
        # The bounds hold for whole contributions: the mean over one short reply may be off in honest work, too. So what
        # is found in one episode does not refuse by itself.
        if spot is not None and await self._refuse_numbers(_episode_alone(claim, spot)) is None:
            return Verdict(True, tokens=tokens), played
        if refusal := await self._refuse_numbers(claim):
            return msgspec.structs.replace(refusal, tokens=tokens, rescored=True), []
        return Verdict(True, rescored=True, tokens=tokens), played

    async def _refuse_numbers(self, claim: PlayedClaim) -> Verdict | None:
        """Compute the tokens of a claim again, and compare."""
        again = await self._queue.rescore(claim.order, claim.contribution)
        return first_refusal(self._numbers, Evidence(claim.order, claim.contribution, claim.played, again))


def _episode_alone(claim: PlayedClaim, index: int) -> PlayedClaim:
    """Return the claim that one episode of a claim is."""
    sent, only = claim.contribution, slice(index, index + 1)
    return PlayedClaim(
        msgspec.structs.replace(claim.order, seeds=claim.order.seeds[only]),
        Contribution(sent.order, sent.precision, sent.episodes[only], sent.proofs[only]),
        claim.played[only],
    )


def first_refusal(checks: Sequence[Check[Case]], case: Case) -> Verdict | None:
    for check in checks:
        if reason := check.refuse(case):
            # Reasons quote strangers, and the ledger keeps them.
            return Verdict(False, check.name, reason[:LONGEST_REASON])
    return None


def sampled_nodes(episode: Episode) -> list[Node]:
    return [node for trace in episode.traces for node in trace.nodes if node.sampled]
