"""Errors that a user can act on: one line, what was wrong, where, and what to do."""


class HeadwayError(Exception):
    """A failure with a message meant for the user. The command line prints it and exits with `exit_code`."""

    exit_code = 1


class UsageError(HeadwayError):
    """The command or its settings were wrong; nothing was started."""

    exit_code = 2
