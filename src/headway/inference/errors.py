"""Errors of engines, as the server answers them."""

from headway.base.errors import HeadwayError


class BusyError(HeadwayError):
    """Too many requests wait; try again in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LoadingError(BusyError):
    """The model is not loaded yet."""


class LeavingError(BusyError):
    """The server is about to end."""


class FailedError(HeadwayError):
    """The engine failed on the request; a retry, or another engine, may succeed."""


class UpdateError(HeadwayError):
    """New weights were refused; the old ones keep serving."""
