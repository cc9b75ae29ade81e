"""Environments that come with Headway. All run offline and are deterministic given their seeds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bundled:
    """Where an environment lives (`module:Class`), and what it is about in a line."""

    path: str
    about: str


_HERE = "headway.envs.bundled"
_ADAPTERS = "headway.envs.adapters"

# Paths, not classes: listing the environments must not import them or what they need.
BUNDLED: dict[str, Bundled] = {
    "reverse-text": Bundled(f"{_HERE}.reverse_text:ReverseText", "write a word backwards (single turn)"),
}
