"""An engine's memory of one version while it arrives in chunks, sent on to engines that came later.

Between two GPUs chunks go by NCCL, otherwise over the socket by which an engine asks: whose other end has died is known
at once.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from headway.base.addresses import own_address
from headway.transport.weights.layout import Layout
from headway.transport.weights.process_pairs import connect_store, gpu_name, pair_backend, process_pair, send_chunks
from headway.transport.weights.relays.tree import ancestors

logger = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 24
"""Bytes sent at a time: messages are slow to begin, and memory for them is kept."""
_ANSWER_SECONDS = 5.0
"""Time in which an engine says whether it has a version; then another one is asked."""
_PATIENCE_SECONDS = 60.0
_LONGEST_LINE = 4096


class Chunk(NamedTuple):
    """Bytes `start` to `end` of piece `piece` of the trainer's process `rank`."""

    rank: int
    piece: int
    start: int
    end: int


def chunks_of(layout: Layout) -> list[Chunk]:
    """Cut a version into what is sent at a time, in the order in which everybody sends it."""
    return [
        Chunk(rank, piece, start, min(start + CHUNK_BYTES, size))
        for rank, sizes in enumerate(layout.pieces)
        for piece, size in enumerate(sizes)
        for start in range(0, size, CHUNK_BYTES)
    ]


class Ask(msgspec.Struct, frozen=True):
    """A request for the chunks of a version from `first` on. `gpu` is the name of the receiver's own, "" for none;
    `pair` names the process pair to meet in, where both have one."""

    version: int
    gpu: str = ""
    first: int = 0
    pair: str = ""


class Member(msgspec.Struct, frozen=True):
    """An engine in the tree of a version: where it listens, and its GPU."""

    host: str
    port: int
    gpu: str


class ArrivingPieces:
    """The memory of a version, of which the first `arrived` chunks have come. `readers` send it on meanwhile."""

    def __init__(self, version: int, layout: Layout, pieces: list[list[Tensor]]) -> None:
        self.version, self.layout, self.pieces = version, layout, pieces
        self.chunks = chunks_of(layout)
        self.arrived = 0
        self.readers = 0
        self.failed = False
        self._news = threading.Condition()

    def place(self, chunk: Chunk) -> Tensor:
        """The memory of a chunk."""
        return self.pieces[chunk.rank][chunk.piece][chunk.start : chunk.end]

    def advance(self) -> None:
        """Count one more chunk as arrived."""
        with self._news:
            self.arrived += 1
            self._news.notify_all()

    def fail(self) -> None:
        """Tell those who wait that the rest will not come, unless it is all there."""
        with self._news:
            self.failed = True
            self._news.notify_all()

    def follow(self, first: int) -> Iterator[Tensor]:
        """Yield the chunks from `first` on as they come. Raises RuntimeError where they don't."""
        for number in range(first, len(self.chunks)):
            with self._news:
                while self.arrived <= number:
                    if self.failed or not self._news.wait(_PATIENCE_SECONDS):
                        raise RuntimeError("the rest of the version did not arrive here")
            yield self.place(self.chunks[number])


class PieceRelay:
    """Lives in an engine that fetches from the trainer whose store is at `host`:`port`."""

    def __init__(self, host: str, port: int, device: torch.device) -> None:
        self.store = (host, port)
        self._device = device if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._held: ArrivingPieces | None = None
        address = own_address(host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        here, at = self._listener.getsockname()[:2]
        self.member = Member(here, at, gpu_name(device) if self._device else "")
        threading.Thread(target=self._listen, name="weights relay", daemon=True).start()

    def hold(self, version: int, layout: Layout, moved: Callable[[], None]) -> tuple[ArrivingPieces, bool]:
        """Take up a version in place of the one before, and in its memory unless that is being sent: then `moved` is
        called. Also tells if this is another attempt at the same version."""
        with self._lock:
            old = self._held
            again = old is not None and old.version == version
            if old is not None and not old.readers and old.layout.pieces == layout.pieces:
                pieces = old.pieces
            else:
                moved()
                pinned = self._device is not None
                pieces = [
                    [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
                    for sizes in layout.pieces
                ]
            self._held = ArrivingPieces(version, layout, pieces)
            return self._held, again

    def join(self, store: Any, version: int) -> list[Member]:
        """Take a place in the tree of a version. Returns the engines above, nearest first."""
        place = store.add(f"engines/{version}", 1) - 1
        store.set(_member_key(version, place), msgspec.json.encode(self.member).decode())
        keys = [_member_key(version, above) for above in ancestors(place)]
        return [msgspec.json.decode(store.get(key), type=Member) for key in keys]

    def drop(self) -> None:
        if self._held is not None:
            self._held.fail()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._listener.close()
        self._held = None

    def _listen(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), name="weights relay", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_PATIENCE_SECONDS)
                ask = msgspec.json.decode(_read_line(connection), type=Ask)
                with self._reading(ask.version) as held:
                    connection.sendall(b"no\n" if held is None else b"yes\n")
                    if held is not None:
                        self._send(connection, ask, held)
        except (RuntimeError, OSError, msgspec.DecodeError) as error:
            logger.info("an engine did not take weights from this one: %s", error)

    def _send(self, connection: socket.socket, ask: Ask, held: ArrivingPieces) -> None:
        if pair_backend(self.member.gpu, ask.gpu) == "nccl":
            with process_pair(connect_store(*self.store), ask.pair, 0, self.store[0], "nccl") as group:
                send_chunks(group, held.follow(ask.first), self._device)
            return
        for chunk in held.follow(ask.first):
            connection.sendall(chunk.numpy().data)

    @contextmanager
    def _reading(self, version: int) -> Iterator[ArrivingPieces | None]:
        with self._lock:
            held = self._held
            if held is None or held.version != version or held.failed:
                held = None
            else:
                held.readers += 1
        try:
            yield held
        finally:
            with self._lock:
                if held is not None:
                    held.readers -= 1


def ask_engine(member: Member, ask: Ask) -> socket.socket:
    """Ask an engine for a version. Returns the connection that chunks come by, unless NCCL brings them. Raises OSError
    or RuntimeError where it is gone, or has another version."""
    connection = socket.create_connection((member.host, member.port), timeout=_ANSWER_SECONDS)
    try:
        connection.sendall(msgspec.json.encode(ask) + b"\n")
        if _read_line(connection) != b"yes":
            raise RuntimeError("it has another version")
    except BaseException:
        connection.close()
        raise
    connection.settimeout(_PATIENCE_SECONDS)
    return connection


def receive_bytes(connection: socket.socket, places: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield chunks as they come, each in its place. Raises OSError where they don't."""
    for place in places:
        rest = place.numpy().data
        while rest:
            count = connection.recv_into(rest)
            if not count:
                raise ConnectionResetError("the connection ended")
            rest = rest[count:]
        yield place


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(1)
        if not data or len(line) > _LONGEST_LINE:
            raise ConnectionResetError("no whole line came")
        line += data
    return line[:-1]


def _member_key(version: int, place: int) -> str:
    return f"engine/{version}/{place}"
