"""The state that all handlers share: the engine, the renderer, the token of admin routes."""

from dataclasses import dataclass, field

from aiohttp import web

from headway.core.protocol import FinishReason
from headway.core.routing import Role
from headway.inference.engine import POLICY, Engine, LoadingError
from headway.inference.handover.records import BlockRecords
from headway.inference.handover.tickets import Tickets
from headway.inference.server.conversations import Conversations
from headway.inference.server.tokenizing import Tokenizing
from headway.rendering.base import Renderer


@dataclass(slots=True)
class ServerContext:
    """`loaded` is the engine once there is one. `token` None closes the admin routes.

    `model_name` is one more name of the policy. `folder` is the model's, `tokenizer` the fingerprint of its tokenizer:
    clients that send tokens compare it with theirs.
    """

    renderer: Renderer
    model_name: str = POLICY
    token: str | None = None
    loaded: Engine | None = None
    folder: str | None = None
    tokenizer: str | None = None
    tokenizing: Tokenizing = field(default_factory=Tokenizing)
    conversations: Conversations = field(default_factory=Conversations)
    tickets: Tickets | None = field(init=False)
    records: BlockRecords = field(init=False)
    generating: set[str] = field(default_factory=set)
    """Requests in flight that may migrate."""
    role: Role = "both"
    url: str | None = None
    """The address of this server that other engines reach, for those who are to fetch KV here."""
    leaving: bool = False
    """Set when the server is told to stop: requests that may migrate are handed over, new ones refused."""

    def __post_init__(self) -> None:
        self.tickets = None if self.token is None else Tickets(self.token)
        self.records = BlockRecords(self.token or "")

    def leave(self) -> None:
        """Hand over the requests that may migrate: each is answered with the tokens that it has."""
        self.leaving = True
        for request_id in list(self.generating):
            self.engine.abort(request_id)

    @property
    def engine(self) -> Engine:
        """Raises LoadingError while there is none."""
        if self.loaded is None:
            raise LoadingError("the model is still loading", retry_after=2)
        return self.loaded

    @property
    def problem(self) -> str | None:
        """The reason why nothing is served right now; None while requests are."""
        if self.leaving:
            return "stopping"
        return "loading the model" if self.loaded is None else self.loaded.problem

    def name_ending(self, reason: FinishReason) -> FinishReason:
        """Tell a request that ended because the server leaves from one that somebody aborted."""
        return "migrate" if self.leaving and reason == "abort" else reason

    def policy_name(self, name: str) -> str:
        """The engine's name of the model that a client asked for."""
        return POLICY if name == self.model_name else name


KEY = web.AppKey("context", ServerContext)


def context_of(request: web.Request) -> ServerContext:
    return request.app[KEY]
