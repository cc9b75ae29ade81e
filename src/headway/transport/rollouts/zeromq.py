"""Batches over ZeroMQ: the orchestrator binds and answers from its run folder; ranks connect and ask for a step.

Either side may restart at any time: the orchestrator finds its batches on disk, and a rank that gets no answer
looks up the address again and asks anew. Over a network both sides prove that they know the run's token, and batches
are encrypted (CURVE).
"""

import threading
import time

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from headway.base.errors import HeadwayError
from headway.core.batches import Batch
from headway.core.control import RunControl
from headway.core.runs import RunPaths
from headway.core.wire import decode, encode
from headway.transport.rollouts.curve import CurvePair, curve_keys
from headway.transport.rollouts.filesystem import BatchSender, RankBatch, check_not_pruned, read_part

ASK_AGAIN_SECONDS = 2.0


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """A rank's request for its part of batch `step`. An answer comes when the batch is there."""

    step: int
    rank: int
    ranks: int


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """`part` is an encoded RankBatch; where it can't be had, `error` says why."""

    step: int
    part: bytes = b""
    error: str = ""


class ZmqSender(BatchSender):
    """Spools batches to disk; a thread answers the ranks' requests from there."""

    serves = True

    def __init__(self, address: str, paths: RunPaths, control: RunControl) -> None:
        super().__init__(paths)
        keys = curve_keys(address, control.token)
        self._context = zmq.Context()
        self._guard = None if keys is None else _allow_only(self._context, keys.client)
        self._router = self._context.socket(zmq.ROUTER)
        if keys is not None:
            keys.secure_server(self._router)
        self._router.setsockopt(zmq.LINGER, 0)
        self._bind(address)
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        control.set_rollouts(endpoint)
        wake = f"inproc://wake-{id(self)}"
        self._woken = self._context.socket(zmq.PULL)
        self._woken.bind(wake)
        self._waker = self._context.socket(zmq.PUSH)
        self._waker.connect(wake)
        self._thread = threading.Thread(target=self._serve, name="rollouts", daemon=True)
        self._thread.start()

    def _bind(self, address: str) -> None:
        try:
            self._router.bind(address.removesuffix(":0") + ":*" if address.endswith(":0") else address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise HeadwayError(f"rollouts.address: cannot listen at {address} ({error}); choose another") from error

    def send(self, batch: Batch, state: bytes) -> None:
        super().send(batch, state)
        self._waker.send(b"look")

    def close(self) -> None:
        self._waker.send(b"end")
        self._thread.join()
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        pending: dict[bytes, Ask] = {}
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._woken in ready and self._woken.recv() == b"end":
                return
            if self._router in ready:
                frames = self._router.recv_multipart()
                ask = _parse_ask(frames[-1])
                if ask is not None:
                    pending[frames[0]] = ask
            for peer, ask in list(pending.items()):
                answer = self._answer(ask)
                if answer is not None:
                    self._router.send_multipart([peer, encode(answer)])
                    del pending[peer]

    def _answer(self, ask: Ask) -> Answer | None:
        try:
            part = read_part(self._paths, ask.step, ask.rank, ask.ranks)
            if part is None:
                check_not_pruned(self._paths, ask.step)
        except HeadwayError as error:
            return Answer(ask.step, error=str(error))
        return None if part is None else Answer(ask.step, part=part)


class ZmqReceiver:
    def __init__(self, address: str, control: RunControl, rank: int, ranks: int) -> None:
        self._address, self._control, self._rank, self._ranks = address, control, rank, ranks
        self._keys = curve_keys(address, control.token)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None

    def receive(self, step: int, timeout: float | None) -> RankBatch | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = ASK_AGAIN_SECONDS if deadline is None else min(ASK_AGAIN_SECONDS, deadline - time.monotonic())
            if left <= 0:
                return None
            answer = self._ask(step, left)
            if answer is None:
                self._disconnect()
            elif answer.error:
                raise HeadwayError(answer.error)
            else:
                return RankBatch.decode(answer.part, f"batch {step} from {self._address}")

    def _ask(self, step: int, seconds: float) -> Answer | None:
        """Ask once and return the answer; None when none came in time."""
        deadline = time.monotonic() + seconds
        socket = self._connect()
        if socket is None:
            time.sleep(min(seconds, 0.05))
            return None
        socket.send(encode(Ask(step, self._rank, self._ranks)))
        while (left := deadline - time.monotonic()) > 0:
            if socket.poll(max(1, int(left * 1000))):
                answer = decode(Answer, socket.recv())
                if answer.step == step:
                    return answer
        return None

    def _connect(self) -> "zmq.Socket[bytes] | None":
        if self._socket is None and (address := self._find_address()) is not None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, 0)
            if self._keys is not None:
                self._keys.secure_client(self._socket)
            self._socket.connect(address)
        return self._socket

    def _find_address(self) -> str | None:
        fixed = not self._address.endswith(":0") and not _listens_everywhere(self._address)
        return self._address if fixed else self._control.rollouts()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        self._context.destroy(linger=0)


def _listens_everywhere(address: str) -> bool:
    return "://0.0.0.0:" in address or "://*:" in address


def _allow_only(context: "zmq.Context[zmq.Socket[bytes]]", client: CurvePair) -> ThreadAuthenticator:
    """Start a guard that lets clients with this key in and nobody else."""

    class Allowed:
        def callback(self, domain: str, key: bytes) -> bool:
            return key == client.public

    guard = ThreadAuthenticator(context)
    guard.start()
    guard.configure_curve_callback("*", Allowed())
    return guard


def _parse_ask(data: bytes) -> Ask | None:
    """Return None for anything that isn't a request: a stranger must not stop the server."""
    try:
        return decode(Ask, data)
    except (msgspec.DecodeError, ValueError):
        return None
