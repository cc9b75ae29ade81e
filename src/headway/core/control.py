"""The control of a run: what its processes announce to each other, through the run folder or over HTTP."""

from typing import Literal, Protocol

import msgspec

from headway.core.protocol import WeightUpdate

Role = Literal["engine", "trainer", "orchestrator"]

NAME_PATTERN = r"^\w[\w.-]{0,99}$"
HEARTBEAT_SECONDS: dict[Role, float] = {"engine": 7.5, "trainer": 2.0, "orchestrator": 0.25}
"""Pause between two heartbeats: an orchestrator hears of new weights with them, a trainer of requests to stop."""
LEASE_SECONDS = 30.0
"""Time after its last heartbeat at which a member that said nothing counts as gone."""


class Member(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A process that joined a run from another host, or tells that it is still there.

    `started` is the time its process began: of two with one name on one host the later one is a restart. `url` is an
    engine's address. `checkpoints` are the complete checkpoints in a trainer's folder.
    """

    name: str
    role: Role
    host: str
    started: float
    url: str = ""
    checkpoints: list[int] | None = None


class RunState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a heartbeat: what a member of that role has to know.

    `stop`: finish the step, write a checkpoint and leave. `finished`: the last step is trained and evaluated, so a
    trainer need not serve its weights any longer. `ended`: the run is over, so engines leave too. `rollouts` is the
    address that trainers ask for batches; the rest is the orchestrator's. `service` changes when the service
    is started again, which has forgotten the versions that trainers serve.
    """

    stop: bool = False
    finished: bool = False
    ended: bool = False
    rollouts: str = ""
    update: WeightUpdate | None = None
    engines: dict[str, str] = msgspec.field(default_factory=dict)
    checkpoints: list[int] = msgspec.field(default_factory=list)
    service: str = ""


class TrainerHost(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A host with some of the trainer's ranks, which waits for the others or tells that its ranks run.

    `started` is new whenever its ranks have to start anew. They meet at `address` and `port` where this host comes
    first. `most` hosts form a group, or `fewest` where no more come. `attempt` is that of its group; 0 while it waits.
    """

    name: str
    started: float
    ranks: int
    address: str
    port: int
    most: int
    fewest: int
    attempt: int = 0


class GroupPlace(msgspec.Struct, frozen=True):
    """A host's place in a group of trainers: its ranks begin at `first_rank`, and all meet at `address`:`port`."""

    attempt: int
    first_rank: int
    world_size: int
    address: str
    port: int


class RunStatus(msgspec.Struct):
    """A run at a glance, for people. `members` are those that joined from other hosts; `silent` their seconds since
    the last heartbeat."""

    run: str
    id: str
    step: int
    max_steps: int
    version: int
    stop: bool
    finished: bool
    ended: bool
    engines: dict[str, str]
    checkpoints: list[int]
    members: list[Member] = msgspec.field(default_factory=list)
    silent: dict[str, float] = msgspec.field(default_factory=dict)


class RunControl(Protocol):
    """The announcements of a run, as its processes read and write them. Reading never waits for another host."""

    @property
    def token(self) -> str | None:
        """The run's secret, which engines and services demand; None where the run has none."""
        ...

    @property
    def address(self) -> str:
        """The address at which other processes of the run reach this host."""
        ...

    def engines(self) -> dict[str, str]:
        """Return the base URLs of the engines that are in the run now, by name."""
        ...

    def announce(self, update: WeightUpdate) -> None:
        """Tell the run that a version can be fetched."""
        ...

    def latest(self) -> WeightUpdate | None:
        """Return the version that was announced last; None before the first."""
        ...

    def set_rollouts(self, address: str) -> None:
        """Tell trainers the address at which the orchestrator answers requests for batches."""
        ...

    def rollouts(self) -> str | None:
        """Return that address; None while there is none."""
        ...

    def checkpoints(self) -> list[int]:
        """Return the steps of the trainer's complete checkpoints, in order."""
        ...

    def stop_asked(self) -> bool:
        """Tell whether the run is to stop: finish the step, write a checkpoint, leave."""
        ...

    def ask_to_stop(self) -> None:
        """Ask all processes of the run to stop."""
        ...

    def finish(self) -> None:
        """Tell the run that its last step is trained and evaluated."""
        ...

    def finished(self) -> bool:
        """Tell whether it is: a trainer which serves its last version may leave then."""
        ...
