"""Membership of the fleet: engines named in the settings, or those that joined the run."""

from collections.abc import Callable, Sequence

from headway.core.control import RunControl

Finder = Callable[[], dict[str, str]]
"""Engines by name: their base URLs."""


def engine_finder(urls: Sequence[str], control: RunControl) -> Finder:
    """The settings' URLs where there are any, else whoever is in the run just now."""
    if urls:
        named = {url: url.rstrip("/") for url in urls}
        return lambda: dict(named)
    return control.engines
