"""The interface of back ends: machinery that makes sandboxes of one kind."""

from abc import ABC, abstractmethod
from typing import ClassVar

from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import Limits, Sandbox, Snapshot


class Backend(ABC):
    """Makes sandboxes. One per worker; `close` ends all that it made."""

    name: ClassVar[str]
    isolates: ClassVar[bool] = True
    """False for `process`, which only those get who ask for it by name."""

    takes: ClassVar[str] = ""
    """What must follow the kind's name and a colon, in words; it is the argument of the constructor."""

    @classmethod
    @abstractmethod
    def check(cls) -> None:
        """Raise SandboxUnavailableError, with what to install, where this machine can't run it."""

    @abstractmethod
    async def create(
        self, recipe: Recipe | None = None, limits: Limits | None = None, snapshot: Snapshot | None = None
    ) -> Sandbox:
        """Start a sandbox. Its work folder is what the recipe prepares, or what the snapshot holds."""

    @abstractmethod
    async def close(self) -> None:
        """End all sandboxes and remove what was prepared."""
