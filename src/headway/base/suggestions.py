"""Suggestions for names that are nearly right."""

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like `name`; None where none is near (1 means equal for `cutoff`)."""
    from difflib import get_close_matches  # here, because it is only needed for errors

    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str | None, quote: str = "") -> str:
    """Return `; did you mean NAME?`, or nothing where there is no name."""
    return f"; did you mean {quote}{name}{quote}?" if name else ""
