"""The state that all handlers share: the engine, the renderer, the token of admin routes."""

from dataclasses import dataclass

from aiohttp import web

from headway.inference.engine import POLICY, Engine, LoadingError
from headway.rendering.base import Renderer


@dataclass(slots=True)
class ServerContext:
    """`loaded` is the engine once there is one. `token` None closes the admin routes.

    `model_name` is one more name of the policy.
    """

    renderer: Renderer
    model_name: str = POLICY
    token: str | None = None
    loaded: Engine | None = None

    @property
    def engine(self) -> Engine:
        """Raises LoadingError while there is none."""
        if self.loaded is None:
            raise LoadingError("the model is still loading", retry_after=2)
        return self.loaded

    @property
    def problem(self) -> str | None:
        """The reason why nothing is served right now; None while requests are."""
        return "loading the model" if self.loaded is None else self.loaded.problem

    def policy_name(self, name: str) -> str:
        """The engine's name of the model that a client asked for."""
        return POLICY if name == self.model_name else name


KEY = web.AppKey("context", ServerContext)


def context_of(request: web.Request) -> ServerContext:
    return request.app[KEY]
