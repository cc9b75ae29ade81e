"""The interface of a check, and the evidence that it is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headway.core.episodes import Episode
from headway.swarm.messages.orders import Contribution, WorkOrder
from headway.swarm.trust.rescored import Rescored


@dataclass(frozen=True, slots=True)
class Claim:
    """An order and the contribution that claims to fulfil it."""

    order: WorkOrder
    contribution: Contribution


@dataclass(frozen=True, slots=True)
class PlayedClaim(Claim):
    """A claim whose episodes were played again with the replies that it has."""

    played: Sequence[Episode]


@dataclass(frozen=True, slots=True)
class Evidence(PlayedClaim):
    """A claim that was played again, and whose sampled tokens a trusted model computed again."""

    rescored: Rescored


Case = TypeVar("Case", bound=Claim, contravariant=True)


class Check(Protocol[Case]):
    """A check of one kind of lie. The less evidence it asks for, the earlier and the more often it runs."""

    name: str

    def refuse(self, case: Case, /) -> str | None:
        """Return why the contribution is refused; None where this check finds nothing."""
        ...
