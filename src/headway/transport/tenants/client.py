"""A tenant's side of a host: joins, sends batches, and fetches reports, adapters and checkpoints."""

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from headway.base.errors import HeadwayError, UsageError
from headway.core.tenants import HostStatus, StepOutcome, TenantJoin, TenantJoined, TenantStatus
from headway.transport.http_client import AnswerError, HttpClient, UnreachableError

POLL_SECONDS = 20.0
"""The host answers a request for a report that is not there after this time."""
REQUEST_SECONDS = 300.0
"""Time without an answer after which a request is sent again: the host answers between two forward passes."""
_LEAVE_SECONDS = 10.0
GONE = 410
BUSY = 429

Body = TypeVar("Body")


class SessionOverError(HeadwayError):
    """The host was started again or dropped this tenant: it has to join again, from its newest checkpoint."""


class HostClient:
    """Calls of a host with one token: the admin's, or the one with which tenants join."""

    def __init__(self, url: str, token: str | None) -> None:
        if not token:
            raise UsageError(
                f"{url} demands a token: tenants join with that in HOST/control/join_token, and status wants that in "
                "HOST/control/token; put it into a file that only you can read and name it in HEADWAY_TOKEN_FILE, or "
                "set HEADWAY_TOKEN"
            )
        self.http = HttpClient(url, token, timeout=REQUEST_SECONDS)

    def engines(self) -> dict[str, str]:
        """Return the addresses of the host's engines, by name."""
        return _decode(self.http.request("GET", "/v1/engines"), dict[str, str])

    def status(self) -> HostStatus:
        return _decode(self.http.request("GET", "/v1/status"), HostStatus)

    def join(self, name: str, join: TenantJoin) -> TenantJoined:
        """Join under a name. Raises UsageError with the host's reason where it refuses."""
        try:
            answer = self.http.request("POST", f"/v1/tenants/{name}/join", msgspec.msgpack.encode(join))
        except AnswerError as error:
            if 400 <= error.status < 500:
                raise UsageError(f"the host at {self.http.url} refused tenant {name!r}: {error}") from None
            raise
        return _decode(answer, TenantJoined)

    def close(self) -> None:
        self.http.close()


def leave(url: str, name: str, token: str) -> None:
    """Give up a tenant's place at a host, and its state there."""
    http = HttpClient(url, token, timeout=_LEAVE_SECONDS)
    try:
        http.request("DELETE", f"/v1/tenants/{name}")
    finally:
        http.close()


class TenantClient:
    """Calls of a tenant that has joined. Each waits for its answer, also while the host is away."""

    def __init__(self, url: str, name: str, token: str, session: str) -> None:
        self._http = HttpClient(url, token, timeout=REQUEST_SECONDS)
        self._route, self._session = f"/v1/tenants/{name}", session

    def submit(self, batch: bytes) -> None:
        """Send the next batch. One that the host has already is not trained twice."""
        self._request("POST", "/batches", batch)

    def outcome(self, step: int) -> StepOutcome | None:
        """Wait for a step's report; None where it took longer than one request may."""
        answer = self._request("GET", f"/outcomes/{step}")
        return msgspec.msgpack.decode(answer, type=StepOutcome | None)

    def evaluate(self, batch: bytes) -> None:
        """Send a batch whose losses are wanted after the step of its number."""
        self._request("POST", "/evaluations", batch)

    def evaluation(self, step: int) -> StepOutcome | None:
        """Wait for an evaluation's report; None where it took longer than one request may."""
        answer = self._request("GET", f"/evaluations/{step}")
        return msgspec.msgpack.decode(answer, type=StepOutcome | None)

    def adapter(self, step: int) -> bytes:
        """Fetch the adapter after a step, as safetensors under PEFT's names."""
        return self._request("GET", f"/adapters/{step}")

    def checkpoint(self, step: int) -> dict[str, bytes]:
        """Fetch the files of the checkpoint of a step, which must be the newest."""
        return msgspec.msgpack.decode(self._request("GET", f"/checkpoints/{step}"), type=dict[str, bytes])

    def beat(self) -> TenantStatus:
        """Tell that this tenant is still there."""
        return _decode(self._request("GET", ""), TenantStatus)

    def close(self) -> None:
        self._http.close()

    def _request(self, method: str, route: str, body: bytes | None = None) -> bytes:
        try:
            return self._http.request(method, f"{self._route}{route}?session={self._session}", body)
        except AnswerError as error:
            if error.status == GONE:
                raise SessionOverError(str(error)) from None
            raise


def patiently(
    call: Callable[[], Body], stop: Callable[[], bool], on_away: Callable[[HeadwayError], None] = lambda _: None
) -> Body:
    """Call until the host answers: it may be starting again. Raises UnreachableError only when asked to stop."""
    pause = 0.1
    while True:
        try:
            return call()
        except UnreachableError as error:
            if stop():
                raise
            on_away(error)
        time.sleep(pause)
        pause = min(2 * pause, 2.0)


def _decode(data: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise HeadwayError(f"the host sent an answer that can't be read: {error}; is it of another version?") from None
