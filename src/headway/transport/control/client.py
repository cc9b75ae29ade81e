"""A run's control over HTTP, from any host: announcements go to the service, answers to heartbeats are kept.

The thread that sends heartbeats never gives up: while the service is away the process works with what it knows.
"""

import logging
import os
import platform
import threading
import time
from typing import TypeVar

import msgspec

from headway.base.addresses import own_address
from headway.base.errors import HeadwayError, UsageError
from headway.core.control import HEARTBEAT_SECONDS, GroupPlace, Member, Role, RunState, RunStatus, TrainerHost
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.control.sending import FileSender
from headway.transport.http_client import AnswerError, HttpClient, UnreachableError

logger = logging.getLogger(__name__)

WAIT_SECONDS = 600.0
"""Time that a process waits for a run which is not there yet."""
LOST_SECONDS = 120.0
"""Time without an answer after which a trainer that has finished takes the run for ended."""
Body = TypeVar("Body")


class ControlClient:
    """Calls of the control service. Each waits for its answer."""

    def __init__(self, url: str, token: str | None) -> None:
        if not token:
            raise UsageError(
                f"{url} demands the run's token: put it into a file that only you can read and name it in "
                "HEADWAY_TOKEN_FILE, or set HEADWAY_TOKEN"
            )
        self.token = token
        self.http = HttpClient(url, token)

    def status(self) -> RunStatus:
        return self.get("/v1/status", RunStatus)

    def settings(self, process: str) -> bytes:
        """Return the run's settings of a process, as TOML."""
        return self.http.request("GET", f"/v1/settings/{process}")

    def latest(self) -> WeightUpdate | None:
        return self.get("/v1/announcements/latest", WeightUpdate | None)  # type: ignore[arg-type]

    def beat(self, member: Member) -> RunState:
        """Join, or tell that this member is still there."""
        return _decode(self.http.request("PUT", f"/v1/members/{member.name}", msgspec.json.encode(member)), RunState)

    def leave(self, member: Member) -> None:
        self.http.request("DELETE", f"/v1/members/{member.name}?started={member.started!r}")

    def meet(self, host: TrainerHost) -> GroupPlace | None:
        """Ask for a host's place in the trainer's group; None while it has to wait, or when its group is over."""
        body = msgspec.json.encode(host)
        answer = self.http.request("PUT", f"/v1/trainer_hosts/{host.name}", body)
        return _decode(answer, GroupPlace | None)  # type: ignore[arg-type]

    def leave_meeting(self, host: TrainerHost) -> None:
        self.http.request("DELETE", f"/v1/trainer_hosts/{host.name}?started={host.started!r}")

    def stop(self) -> None:
        self.http.request("POST", "/v1/stop")

    def get(self, route: str, kind: type[Body]) -> Body:
        return _decode(self.http.request("GET", route), kind)

    def wait(self, seconds: float = WAIT_SECONDS) -> RunStatus:
        """Return the run's status as soon as the service answers: it may be started later than its members.

        Raises HeadwayError when that takes too long, and UsageError where it refuses the token.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self.status()
            except UnreachableError as error:
                if time.monotonic() > deadline:
                    raise HeadwayError(f"{error}; is the run's `headway rl` up, and its control.port open?") from None
            except AnswerError as error:
                raise UsageError(f"{self.http.url}: {error}") from None
            time.sleep(0.5)


class JoinedControl:
    """The control of a run for one of its members, which is in the run until `close`. `paths` is its own folder."""

    def __init__(self, client: ControlClient, paths: RunPaths, role: Role, name: str, url: str = "") -> None:
        """Join. Raises HeadwayError where the run refuses that."""
        self.client, self.token = client, client.token
        self._paths = paths
        self._member = Member(name, role, own_name(), time.time(), url)
        self._sender = FileSender(client.http, paths, name, own_name())
        self._announced: WeightUpdate | None = None
        self._unsent: WeightUpdate | None = None
        self._stop = threading.Event()
        self._state = self._beat()
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return own_address(self.client.http.host)

    def engines(self) -> dict[str, str]:
        return self._state.engines

    def announce(self, update: WeightUpdate) -> None:
        """Tell the run of a version. A service that is away is told with the next one; nobody waits."""
        self._announced = update
        try:
            self.client.http.request("POST", "/v1/announcements", msgspec.json.encode(update))
            self._unsent = None
        except UnreachableError as error:
            logger.warning("version %d is not announced yet: %s", update.version, error)
            self._unsent = update

    def latest(self) -> WeightUpdate | None:
        return self._state.update

    def set_rollouts(self, address: str) -> None:
        address = address.replace("0.0.0.0", self.address)
        self.client.http.request("PUT", "/v1/rollouts", msgspec.json.encode(address))

    def rollouts(self) -> str | None:
        """Return the address of batches; one that listens everywhere is on the host of the service."""
        return self._state.rollouts.replace("0.0.0.0", self.client.http.host) or None

    def checkpoints(self) -> list[int]:
        return self._state.checkpoints

    def stop_asked(self) -> bool:
        return self._state.stop

    def ask_to_stop(self) -> None:
        self.client.stop()

    def finish(self) -> None:
        self.client.http.request("POST", "/v1/finish")

    def finished(self) -> bool:
        return self._state.finished or self.ended() or time.monotonic() - self._heard > LOST_SECONDS

    def ended(self) -> bool:
        """Tell whether the run is over: nobody will ask this process for anything."""
        return self._state.ended

    def close(self) -> None:
        """Send what is left of metrics and logs, and leave."""
        self._stop.set()
        self._thread.join()
        try:
            if self._member.role == "trainer":
                self._beat()  # tells of the last checkpoint
            self._sender.send()
            self.client.leave(self._member)
        except HeadwayError as error:
            logger.warning("the run was not told that %s leaves: %s", self._member.name, error)
        self.client.http.close()

    def _run(self) -> None:
        """Send heartbeats, and then what files have grown by, until closed."""
        away = False
        while not self._stop.wait(HEARTBEAT_SECONDS[self._member.role]):
            try:
                before, self._state = self._state, self._beat()
                self._heard = time.monotonic()
                if self._state.service != before.service:
                    self._unsent = self._announced
                if away:
                    logger.info("the run's control service at %s answers again", self.client.http.url)
                away = False
                if (unsent := self._unsent) is not None:
                    self.announce(unsent)
                self._sender.send()
            except HeadwayError as error:
                if not away:
                    logger.warning("%s; this process goes on, and tries again", error)
                away = True

    def _beat(self) -> RunState:
        member = self._member
        if member.name == "trainer":  # the first rank
            member = msgspec.structs.replace(member, checkpoints=self._paths.complete_checkpoints())
        return self.client.beat(member)


def own_name() -> str:
    """Return the name of this host; under Slurm that of the node, of which tests have several on one host."""
    return os.environ.get("SLURMD_NODENAME") or platform.node() or "localhost"


def _decode(data: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise HeadwayError(f"the control service sent an answer that can't be read: {error}") from None
