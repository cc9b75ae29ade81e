"""Tokenized rows, end to end in flat arrays: made once, then only sliced."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import HeadwayError
from headway.core.files import write_atomic
from headway.core.rows import Row
from headway.core.streams import Flags, Ints
from headway.core.wire import decode, encode
from headway.rendering.base import Renderer
from headway.trainer.data.conversations import BadRowError, conversation, tokenize

logger = logging.getLogger(__name__)
_SHOWN = 5


@dataclass(slots=True)
class SkippedRows:
    """Rows that are not learned as they stand: reasons of the bad ones, and counts."""

    bad: list[str] = field(default_factory=list)
    truncated: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Row i is `token_ids[starts[i]:starts[i + 1]]`; `learned` marks the tokens that count in the loss."""

    token_ids: Ints
    learned: Flags
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    @property
    def digest(self) -> str:
        """A hash of the tokens and marks in their order."""
        state = hashlib.blake2b(digest_size=16)
        for array in (self.token_ids, self.learned, self.starts):
            state.update(np.ascontiguousarray(array).data)
        return state.hexdigest()

    def save(self, path: Path) -> None:
        write_atomic(path, encode([self.token_ids, self.learned, self.starts]))

    @classmethod
    def load(cls, path: Path) -> "TokenRows":
        token_ids, learned, starts = decode(list[np.ndarray], path.read_bytes())
        return cls(token_ids, learned, starts)


def tokenize_rows(
    rows: Iterable[Row],
    renderer: Renderer,
    *,
    seq_len: int,
    train_roles: Sequence[str],
    too_long: Literal["truncate", "drop"] = "truncate",
    max_bad_rows: int = 0,
) -> tuple[TokenRows, SkippedRows]:
    """Tokenize all rows that can be learned from. Raises HeadwayError above `max_bad_rows` bad ones, naming some."""
    skipped = SkippedRows()
    tokens: list[Ints] = []
    learned: list[Flags] = []
    for row in rows:
        try:
            if row.error is not None:
                raise BadRowError(row.error)
            token_ids, marks = tokenize(*conversation(row.data), renderer, train_roles)
        except BadRowError as error:
            _skip_bad(skipped, f"{row.where}: {error}", max_bad_rows)
            continue
        if len(token_ids) > seq_len:
            if too_long == "drop" or not marks[:seq_len].any():
                skipped.dropped += 1
                continue
            skipped.truncated += 1
            token_ids, marks = token_ids[:seq_len], marks[:seq_len]
        tokens.append(token_ids)
        learned.append(marks)
    starts = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
    if not tokens:
        return TokenRows(np.zeros(0, np.int32), np.zeros(0, np.bool_), starts), skipped
    return TokenRows(np.concatenate(tokens), np.concatenate(learned), starts), skipped


def _skip_bad(skipped: SkippedRows, what: str, most: int) -> None:
    skipped.bad.append(what)
    if len(skipped.bad) <= _SHOWN:
        logger.warning("skipped a bad row: %s", what)
    if len(skipped.bad) > most:
        named = "; ".join(skipped.bad[:_SHOWN])
        raise HeadwayError(
            f"more than data.max_bad_rows = {most} bad rows, the first: {named}. Fix the data or raise that setting"
        )
