"""Tokenized rows, end to end in flat arrays: made once, then only sliced."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.base.errors import HeadwayError
from headway.base.files import write_atomic
from headway.core.image_files import ImageFiles
from headway.core.images import ImageUse
from headway.core.rows import Row
from headway.core.streams import Flags, Ints
from headway.core.wire import decode, encode
from headway.rendering.base import Renderer
from headway.trainer.data.conversations import BadRowError, TokenizedRow, conversation, tokenize

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
    """Row i is `token_ids[starts[i]:starts[i + 1]]`; `learned` marks the tokens that count in the loss. `images` are
    those of rows that have any, by the row's number, counted from its first token."""

    token_ids: Ints
    learned: Flags
    starts: NDArray[np.int64]
    images: dict[int, list[ImageUse]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[TokenizedRow]) -> "TokenRows":
        """Join rows, end to end."""
        return cls(
            np.concatenate([np.zeros(0, np.int32), *(row.token_ids for row in rows)]),
            np.concatenate([np.zeros(0, np.bool_), *(row.learned for row in rows)]),
            np.cumsum([0, *(len(row.token_ids) for row in rows)], dtype=np.int64),
            {number: row.images for number, row in enumerate(rows) if row.images},
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    @property
    def digest(self) -> str:
        """A hash of the tokens and marks in their order, and of the images."""
        state = hashlib.blake2b(digest_size=16)
        for array in (self.token_ids, self.learned, self.starts):
            state.update(np.ascontiguousarray(array).data)
        if self.images:
            state.update(encode(sorted(self.images.items())))
        return state.hexdigest()

    def save(self, path: Path) -> None:
        write_atomic(path, encode(_SavedRows(self.token_ids, self.learned, self.starts, self.images)))

    @classmethod
    def load(cls, path: Path) -> "TokenRows":
        saved = decode(_SavedRows, path.read_bytes())
        return cls(saved.token_ids, saved.learned, saved.starts, saved.images)


class _SavedRows(msgspec.Struct, array_like=True):
    """`TokenRows` in a file."""

    token_ids: Ints
    learned: Flags
    starts: NDArray[np.int64]
    images: dict[int, list[ImageUse]]


def tokenize_rows(
    rows: Iterable[Row],
    renderer: Renderer,
    *,
    seq_len: int,
    train_roles: Sequence[str],
    too_long: Literal["truncate", "drop"] = "truncate",
    max_bad_rows: int = 0,
    images: ImageFiles | None = None,
) -> tuple[TokenRows, SkippedRows]:
    """Tokenize all rows that can be learned from, and store what they show in `images`. Raises HeadwayError above
    `max_bad_rows` bad ones, naming some."""
    skipped = SkippedRows()
    found: list[TokenizedRow] = []
    for row in rows:
        try:
            if row.error is not None:
                raise BadRowError(row.error)
            messages, tools = conversation(row.data, row.folder)
            tokenized = tokenize(messages, tools, renderer, train_roles)
        except BadRowError as error:
            _skip_bad(skipped, f"{row.where}: {error}", max_bad_rows)
            continue
        if len(tokenized.token_ids) > seq_len:
            tokenized = tokenized.cut(seq_len)
            if too_long == "drop" or not tokenized.learned.any():
                skipped.dropped += 1
                continue
            skipped.truncated += 1
        if images is not None:
            images.keep({image.digest: image.data for message in messages for image in message.images})
        found.append(tokenized)
    return TokenRows.of(found), skipped


def _skip_bad(skipped: SkippedRows, what: str, most: int) -> None:
    skipped.bad.append(what)
    if len(skipped.bad) <= _SHOWN:
        logger.warning("skipped a bad row: %s", what)
    if len(skipped.bad) > most:
        named = "; ".join(skipped.bad[:_SHOWN])
        raise HeadwayError(
            f"more than data.max_bad_rows = {most} bad rows, the first: {named}. Fix the data or raise that setting"
        )
