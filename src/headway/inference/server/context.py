"""The state that all handlers share: the engine, the renderer, the token of admin routes."""

from dataclasses import dataclass, field

from aiohttp import web

from headway.core.protocol import FinishReason
from headway.core.routing import Role
from headway.inference.engine import POLICY, Engine
from headway.inference.errors import LoadingError
from headway.inference.handover.records import BlockRecords
from headway.inference.handover.tickets import Tickets
from headway.inference.server.conversations import Conversations
from headway.inference.server.tokenizing import Tokenizing
from headway.inference.tenants.admission import Admission
from headway.inference.tenants.grants import Grants, tenant_secret
from headway.inference.tenants.view import HostAddress, TenantEngine
from headway.rendering.base import Renderer


@dataclass(slots=True)
class ServerContext:
    """`loaded` is the engine once there is one. `token` None closes the admin routes.

    `model_name` is one more name of the policy, for clients that know the model by it. `folder` is the model's,
    `tokenizer` the fingerprint of its tokenizer: clients that send tokens compare it with theirs.
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
    max_waiting: int = 4096
    """Requests of all tenants that may wait for their turn."""
    grants: Grants = field(default_factory=Grants)
    admission: Admission | None = None
    """Where requests of tenants wait; made for the first."""
    host: HostAddress | None = None
    """Where adapters of tenants come from; None where whoever has the token loads them."""
    views: dict[str, "TenantView"] = field(default_factory=dict)
    """The server as its tenants see it, of those who were here."""

    def __post_init__(self) -> None:
        self.tickets = None if self.token is None else Tickets(self.token)
        self.records = BlockRecords(self.token or "")

    def leave(self) -> None:
        """Hand over the requests that may migrate: each is answered with the tokens that it has."""
        self.leaving = True
        for request_id in list(self.generating):
            self.engine.abort(request_id)
        for view in self.views.values():
            view.leave()

    def view(self, name: str) -> "TenantView":
        """The server as tenant `name` sees it. Raises LoadingError while there is no engine."""
        if self.admission is None:
            self.admission = Admission(self.engine, self.grants, self.max_waiting)
        if name not in self.views:
            self.views[name] = TenantView.of(self, name, self.admission)
        view = self.views[name]
        view.tenant.share = self.grants.share(name)
        return view

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

    def models(self) -> dict[str, int]:
        """Versions of all that is served, by every name that a client may ask for."""
        models = self.engine.models()
        return {POLICY: models[POLICY], self.model_name: models[POLICY], **models} if POLICY in models else models

    def policy_name(self, name: str) -> str:
        """The engine's name of the model that a client asked for."""
        return POLICY if name == self.model_name else name


class TenantView(ServerContext):
    """The server as one tenant sees it: conversations, tickets and KV records are its own, and so is the policy."""

    tenant: TenantEngine

    @classmethod
    def of(cls, context: ServerContext, name: str, admission: Admission) -> "TenantView":
        assert context.token is not None
        secret = tenant_secret(context.token, name)
        tenant = TenantEngine(context.engine, name, secret, admission, context.host)
        view = cls(
            context.renderer,
            name,
            secret,
            tenant,
            context.folder,
            context.tokenizer,
            context.tokenizing,
            role=context.role,
            url=context.url,
            leaving=context.leaving,
        )
        view.tenant = tenant
        return view


KEY = web.AppKey("context", ServerContext)
VIEW = web.RequestKey("view", TenantView)


def context_of(request: web.Request) -> ServerContext:
    """The server as the caller sees it."""
    return request.get(VIEW) or request.app[KEY]
