"""Options that are no settings, taken out of a command line before the settings are read."""

from headway.core.errors import UsageError


def take(argv: list[str], flag: str, what: str) -> tuple[list[str], str | None]:
    """`argv` without `flag VALUE`, and the value; None where the flag isn't there. `what` says what the value is."""
    if flag not in argv:
        return argv, None
    at = argv.index(flag)
    if at + 1 >= len(argv) or argv[at + 1].startswith(("-", "@")):
        raise UsageError(f"{flag} needs {what}")
    return argv[:at] + argv[at + 2 :], argv[at + 1]
