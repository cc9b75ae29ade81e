"""The ledger of a swarm: a file of JSON lines that only grows. Each line holds the hash of the one before and the run's
signature, so that nothing in it can be changed, left out or moved without being seen."""

import os
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import msgspec

from headway.base.errors import DamagedError, UsageError
from headway.swarm.messages.canonical import encode
from headway.swarm.messages.keys import SigningKey, is_signed
from headway.swarm.trust.events import Event, Opened

FIRST = "0" * 64
"""The hash before the first line."""
_KIND = "LedgerLine"


class LedgerLine(msgspec.Struct, frozen=True):
    """`hash` covers number, time, event and `previous`, the hash of the line before; `signature` covers the hash."""

    number: int
    at: float
    previous: str
    event: Event
    hash: str
    signature: str


class Ledger:
    """Appends events to the ledger in `path`, signed with the run's key. One process writes at a time."""

    def __init__(self, path: Path, key: SigningKey, clock: Callable[[], float] = time.time) -> None:
        """Continue the ledger where it ends. Raises DamagedError where it is not intact, and UsageError where another
        key began it. A last line without an end, as a crash leaves it, is dropped."""
        self._key, self._clock = key, clock
        self._number, self._hash = 0, FIRST
        self.events: list[Event] = []
        """The events that were there already."""
        if path.exists():
            _drop_torn_line(path)
            for line in read_ledger(path):
                self._number, self._hash = line.number + 1, line.hash
                self.events.append(line.event)
            if self.events and isinstance(first := self.events[0], Opened) and first.key != key.public.hex():
                raise UsageError(f"{path} was begun with another key; continue it with that one, or begin another")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def append(self, event: Event) -> None:
        """Write an event; it is on the disk when this returns."""
        at = self._clock()
        hashed = line_hash(self._number, at, self._hash, event)
        signature = self._key.sign_bytes(_KIND, bytes.fromhex(hashed))
        line = LedgerLine(self._number, at, self._hash, event, hashed, signature.hex())
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._number, self._hash = self._number + 1, hashed

    def close(self) -> None:
        self._file.close()


def line_hash(number: int, at: float, previous: str, event: Event) -> str:
    return sha256(encode([number, at, previous, event])).hexdigest()


def read_ledger(path: Path, key: bytes | None = None) -> Iterator[LedgerLine]:
    """Read a ledger and check every line on the way; by default against the key that its first line names.

    Raises DamagedError at the first line that is not what was written there.
    """
    previous = FIRST
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file):
                line = _decode(path, number, text)
                if number == 0 and not isinstance(line.event, Opened):
                    raise DamagedError(f"{path}: line 1 does not say who keeps the ledger")
                if number == 0 and isinstance(line.event, Opened) and key is None:
                    key = _key_bytes(path, line.event.key)
                assert key is not None or number > 0
                _check_line(path, number, line, previous, key or b"")
                previous = line.hash
                yield line
    except FileNotFoundError:
        raise UsageError(f"{path}: no such ledger") from None


def _decode(path: Path, number: int, text: bytes) -> LedgerLine:
    try:
        line = msgspec.json.decode(text, type=LedgerLine)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: line {number + 1} is not a line of a ledger ({error})") from None
    if msgspec.json.encode(line) != text.removesuffix(b"\n"):
        # A field that is misspelled, and has its default anyway, would mean the same.
        raise DamagedError(f"{path}: line {number + 1} was changed: it is not as it is written")
    return line


def _key_bytes(path: Path, key: str) -> bytes:
    try:
        return bytes.fromhex(key)
    except ValueError:
        raise DamagedError(f"{path}: line 1 names a key that is none") from None


def _check_line(path: Path, number: int, line: LedgerLine, previous: str, key: bytes) -> None:
    where = f"{path}: line {number + 1}"
    if line.number != number or line.previous != previous:
        raise DamagedError(f"{where} does not follow the line before: lines were left out, added or moved")
    if line.hash != line_hash(line.number, line.at, line.previous, line.event):
        raise DamagedError(f"{where} was changed: its hash is another one")
    try:
        signature = bytes.fromhex(line.signature)
    except ValueError:
        signature = b""
    if not is_signed(_KIND, bytes.fromhex(line.hash), key, signature):
        raise DamagedError(f"{where} is not signed by the run's key")


def _drop_torn_line(path: Path) -> None:
    """Cut off what stands after the last end of a line: a write that a crash has cut short."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with path.open("r+b") as file:
            file.truncate(end)
            os.fsync(file.fileno())
