"""Sandboxes of an environment: the pool of a worker, limits from settings, and metrics of an episode."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, get_args

from headway.base.errors import UsageError
from headway.envs.policy import Policy
from headway.sandboxes.meters import Meters, measured
from headway.sandboxes.pool import SandboxPool
from headway.sandboxes.sandbox import Limit, Limits, SandboxError


def read_limits(environment: str, limits: Mapping[str, Any] | None) -> Limits:
    """Build limits from an environment's argument. Raises UsageError for names and values that are none."""
    try:
        return Limits(**(limits or {}))
    except (TypeError, SandboxError) as error:
        names = ", ".join(Limits.__dataclass_fields__)
        raise UsageError(f"{environment}: limits: {error}; they are {names}") from None


class Sandboxes:
    """The sandboxes of one environment: a pool, made at the first episode, and limits."""

    def __init__(
        self,
        environment: str,
        kind: str = "auto",
        limits: Mapping[str, Any] | None = None,
        most: int = 32,
        warm: int = 0,
    ) -> None:
        self.limits = read_limits(environment, limits)
        self._environment, self._kind, self._most, self._warm = environment, kind, most, warm
        self._pool: SandboxPool | None = None

    @property
    def pool(self) -> SandboxPool:
        if self._pool is None:
            self._pool = SandboxPool(self._kind, most=self._most, warm=self._warm)
        return self._pool

    @asynccontextmanager
    async def episode(self, policy: Policy) -> AsyncIterator[Meters]:
        """Record with the episode what sandboxes did for it, as metrics that begin with `sandbox_`."""
        with measured() as meters:
            try:
                yield meters
            finally:
                for limit in get_args(Limit):  # 0 where none was hit: a step's mean is over all episodes
                    meters.count(f"limit_{limit}", 0.0)
                for name, value in meters.sums.items():
                    policy.metric(f"sandbox_{name}", value)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
            self._pool = None
