"""A contributor's requests to its run: answers count that only the run's key can have signed."""

from http import HTTPStatus

from headway.swarm.messages.api import Answer, SwarmTerms, WorkerStanding, WorkRequest
from headway.swarm.messages.canonical import InvalidMessageError, decode, encode
from headway.swarm.messages.keys import Signed, open_signed
from headway.swarm.messages.orders import Contribution, WorkOrder
from headway.swarm.weights.peer import Peer


class SwarmClient:
    """A contributor's requests to the run. `run_key` is the run's, once it is known."""

    def __init__(self, peer: Peer, run_key: bytes | None = None) -> None:
        self.peer, self.run_key = peer, run_key

    async def terms(self) -> SwarmTerms:
        """Ask for the run's terms; the first answer decides whose signatures count from then on."""
        signed = decode(Signed, await self.peer.get("/v1/terms"))
        terms = open_signed(SwarmTerms, signed, self.run_key)
        self.run_key = signed.key
        return terms

    async def order(self, run: str) -> WorkOrder | None:
        """Ask for work; None where there is none now. Raises SourceError and CutOffError."""
        status, body = await self.peer.post("/v1/orders", encode(self.peer.key.sign(WorkRequest(run))))
        if status == HTTPStatus.NO_CONTENT:
            return None
        order = open_signed(WorkOrder, decode(Signed, body), self.run_key)
        if order.worker != self.peer.key.public:
            raise InvalidMessageError("the run gave an order that is for another worker")
        return order

    async def contribute(self, contribution: Contribution) -> Answer:
        _, body = await self.peer.post("/v1/contributions", encode(self.peer.key.sign(contribution)))
        return decode(Answer, body)

    async def standing(self) -> WorkerStanding:
        return decode(WorkerStanding, await self.peer.get("/v1/standing"))
