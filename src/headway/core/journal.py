"""The journal of an orchestrator: what happened to it and what it decided, in order, small enough to keep always.

Inputs are all that decisions depend on: time passes only from one input to the next, and a `Seen` before an input says
what the fleet and the trainer looked like then. Decisions follow from inputs, and are kept to be read and compared. A
file holds frames of many events, each frame with its length and checksum, so that a torn end is found and cut.
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import msgspec

FORMAT = 1
_FRAME = struct.Struct("<II")
_LARGEST_FRAME = 1 << 30
_FRAME_EVENTS = 4096
"""Events that are written at the latest, whether anybody asks for it or not."""


class Event(msgspec.Struct, array_like=True, omit_defaults=True):
    """One line of a journal. Ids of groups and episodes are short: see `short_id`."""


class Input(Event):
    """Something that the orchestrator reacts to, `after` milliseconds after the input before it."""

    after: int = 0


class Began(Input, tag=0):
    """An orchestrator process starts after batch `step`, in the `state` that was sent with it. Nothing before it goes
    on. `settings` are those of `headway orchestrate`, as JSON; `tasks` are counted by environment."""

    step: int = 0
    state: bytes = b""
    prefix: str = ""
    settings: bytes = b""
    tasks: dict[str, int] = {}
    eval_tasks: dict[str, int] = {}
    time: float = 0.0
    format: int = FORMAT


class Seen(Event, tag=1):
    """From the next input on: the version that engines serve, the trainer's newest, and whether an update is on its
    way to the engines."""

    served: int
    newest: int
    updating: bool
    fingerprint: str = ""
    """Fingerprint of the newest version's weights; empty where it was noted before."""


class Finished(Input, tag=2):
    """An episode came back. `error` is its kind, empty for success."""

    episode: str = ""
    error: str = ""


class Scored(Input, tag=3):
    """All is there to score a group. `failed`: except the reply of its reference model."""

    group: str = ""
    failed: bool = False


class Looked(Input, tag=4):
    """The loop looks whether it can send a batch."""


class Pumped(Input, tag=5):
    """Time came to start episodes that had waited for it."""


class Steered(Input, tag=6):
    """The engines' load, once a second; `running` is -1 while none reports."""

    running: int = -1
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0


class Updated(Input, tag=7):
    """All engines that serve have this version."""

    version: int = 0


class Arrived(Input, tag=9):
    """A verified group of a swarm is taken, whole: `size` episodes of this version."""

    group: str = ""
    env: str = ""
    task: int = 0
    version: int = 0
    size: int = 0


class Discarded(Input, tag=10):
    """A group of a swarm is dropped by `cause`: before it was taken ("stale"), or after that, before it was in a batch
    ("refused": its worker was found lying)."""

    group: str = ""
    episodes: int = 0
    cause: str = ""


class Sent(Event, tag=8):
    """A batch is on disk. `digest` is that of its micro-batches."""

    step: int
    digest: bytes


class Opened(Event, tag=16):
    """A group of episodes of one task is dispatched, pinned to `version`."""

    group: str
    env: str
    task: int
    version: int


class Cancelled(Event, tag=17):
    """A group is given up."""

    group: str
    cause: str


class ClosedEarly(Event, tag=18):
    """A group is closed without its slowest episodes."""

    group: str


class Failed(Event, tag=19):
    """A group ended with too few episodes that did not fail."""

    group: str


class Judged(Event, tag=20):
    """The outcome of scoring and filters; empty `cause`: it may be trained. `reward` is the mean over its `rollouts`,
    of which `episodes` are left. `algorithm` is the algorithm's state after it, where that has one, as JSON."""

    group: str
    cause: str
    rollouts: int
    episodes: int
    oldest_version: int
    reward: float
    dropped: dict[str, int] = {}
    algorithm: bytes = b""


class Expired(Event, tag=21):
    """A group that may be trained became too old before its batch."""

    group: str


class Formed(Event, tag=22):
    """Batch `step` consists of these groups."""

    step: int
    groups: list[str]


class Capped(Event, tag=23):
    """The concurrency controller allows this many episodes in flight, and gives up `cancel` of the youngest."""

    limit: int
    cancel: int


AnyEvent = Union[  # noqa: UP007  # msgspec wants the classes, not their base
    Began, Seen, Finished, Scored, Looked, Pumped, Steered, Updated, Sent, Arrived, Discarded, Opened, Cancelled,
    ClosedEarly, Failed, Judged, Expired, Formed, Capped,
]  # fmt: skip
_decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[AnyEvent])
_encoder = msgspec.msgpack.Encoder()


def short_id(prefix: str, id_: str) -> str:
    """Return an id without the `prefix` of its process. One that has none, of a swarm, is marked."""
    return id_[len(prefix) :] if id_.startswith(prefix) else f"={id_}"


def full_id(prefix: str, short: str) -> str:
    """Return the id that `short_id` made shorter."""
    return short[1:] if short.startswith("=") else prefix + short


class JournalFile:
    """Appends events to a file of at most `max_bytes`. What a crash left torn at its end is cut when it is opened."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._size = sum(len(frame) for frame in _frames(path))
        os.ftruncate(self._file, self._size)
        os.lseek(self._file, self._size, os.SEEK_SET)
        self._max_bytes = max_bytes
        self._events: list[Event] = []
        self.full = self._size >= max_bytes

    def add(self, event: Event) -> None:
        if self.full:
            return
        self._events.append(event)
        if len(self._events) >= _FRAME_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Hand all events to the operating system, as one frame: they outlive this process, whatever ends it."""
        if not self._events:
            return
        frame = _encode(self._events)
        self._events.clear()
        if self._size + len(frame) > self._max_bytes:
            self.full = True
            return
        try:
            written = os.write(self._file, frame)
            if written < len(frame):
                os.write(self._file, frame[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(frame)

    def close(self) -> None:
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            self._file = -1


@dataclass(frozen=True, slots=True)
class JournalContent:
    """The events of a journal. `torn`: something follows that cannot be read, as after a crash or while it grows."""

    events: Sequence[Event]
    torn: bool
    size: int


def read_journal(path: Path) -> JournalContent:
    """Read a journal up to its end, or to where it is torn. A missing file has no events."""
    if not path.exists():
        return JournalContent([], False, 0)
    events: list[Event] = []
    size = 0
    for frame in _frames(path):
        try:
            events += _decoder.decode(zlib.decompress(frame[_FRAME.size :]))
        except (zlib.error, msgspec.DecodeError):  # a whole frame of another format
            break
        size += len(frame)
    return JournalContent(events, size < path.stat().st_size, size)


def _encode(events: Sequence[Event]) -> bytes:
    data = zlib.compress(_encoder.encode(events), 6)
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


def _frames(path: Path) -> Iterator[bytes]:
    """Yield whole frames, with their heads, up to the first that is not."""
    with path.open("rb") as file:
        while len(head := file.read(_FRAME.size)) == _FRAME.size:
            length, checksum = _FRAME.unpack(head)
            data = file.read(length) if length <= _LARGEST_FRAME else b""
            if len(data) != length or zlib.crc32(data) != checksum:
                return
            yield head + data
