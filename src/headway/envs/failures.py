"""Failures that end an episode: exceptions on the inside, data (`EpisodeError`) on the outside."""

import traceback

from headway.core.episodes import EpisodeError, ErrorKind

DETAIL_LIMIT = 8000
MESSAGE_LIMIT = 1000


class EpisodeFailure(Exception):  # noqa: N818 - `EpisodeError` is the same as data
    """Ends the episode with an error of this kind. Environments may raise it, or catch a policy's."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class ContextLimit(EpisodeFailure):
    """The conversation no longer fits the model's context."""

    def __init__(self, message: str) -> None:
        super().__init__("context", message)


def as_error(failure: BaseException, kind: ErrorKind = "environment") -> EpisodeError:
    """`failure` as data, with the end of its traceback. An `EpisodeFailure` knows its own kind."""
    if isinstance(failure, EpisodeFailure):
        kind, message = failure.kind, failure.message
    else:
        message = f"{type(failure).__name__}: {failure}"
    detail = "".join(traceback.format_exception(failure))
    return EpisodeError(kind, message[:MESSAGE_LIMIT], detail[-DETAIL_LIMIT:])
