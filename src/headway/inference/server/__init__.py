"""The HTTP side of an engine: the routes of the inference protocol and OpenAI's."""

from headway.inference.server.app import build_app
from headway.inference.server.context import ServerContext

__all__ = ["ServerContext", "build_app"]
