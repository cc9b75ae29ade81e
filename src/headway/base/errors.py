"""Errors that a user can act on: one line, what was wrong, where, and what to do."""

STOPPED = 130
"""Exit code of a command that was asked to stop before its work was done."""
MESSAGE_PREFIX = "headway: "
"""Begins every line that a command prints about its failure."""
CRASHED = 70
"""Exit code of a command that failed in a way nobody foresaw."""


class HeadwayError(Exception):
    """A failure with a message meant for the user. The command line prints it and exits with `exit_code`."""

    exit_code = 1


class PermanentError(HeadwayError):
    """A failure that another attempt with the same settings and files would repeat, so nobody should try again."""

    exit_code = 3


class DamagedError(PermanentError):
    """Files that a run needs are damaged, and only a person can decide what to do about it."""

    exit_code = 4


class UsageError(HeadwayError):
    """The command or its settings were wrong; nothing was started."""

    exit_code = 2
