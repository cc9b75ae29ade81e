"""One sign of trouble in a run, with its figures and the rollouts that show it."""

from typing import Literal

import msgspec

Level = Literal["problem", "warning", "notice"]
LEVELS: tuple[Level, ...] = ("problem", "warning", "notice")
"""From the gravest on. A problem is an exploit at work, a warning wants a look, a notice is good to know."""

Cause = Literal[
    "tampering",
    "held_out",
    "second_scorer",
    "grader",
    "leak",
    "format",
    "keyword",
    "repetition",
    "copying",
    "language",
    "length",
    "collapse",
    "agreement",
]


class Example(msgspec.Struct, frozen=True):
    """A rollout that shows a finding: line `line` of the records of `step`, and the beginning of what was said."""

    step: int
    line: int
    group: str
    reward: float
    text: str


class Finding(msgspec.Struct, frozen=True):
    """`text` says the cause in a sentence, `remedy` what to do; `figures` are what it was concluded from."""

    level: Level
    cause: Cause
    env: str
    text: str
    remedy: str
    figures: dict[str, float] = {}
    examples: tuple[Example, ...] = ()
    strength: float = 0.0
    """How much of the reward it explains, from 0 to 1: of findings of one level the strongest comes first."""

    @property
    def name(self) -> tuple[str, str]:
        """Environment and cause: the same trouble keeps its name as a run goes on."""
        return self.env, self.cause


SYMPTOMS = ("held_out", "second_scorer", "collapse", "agreement")
"""Findings that say that something is wrong, and not what."""


def ranked(findings: list[Finding]) -> list[Finding]:
    """Sort the gravest first; of equally grave ones those that name the cause, and the strongest of these."""

    def rank(found: Finding) -> tuple[int, bool, float, tuple[str, str]]:
        return LEVELS.index(found.level), found.cause in SYMPTOMS, -found.strength, found.name

    return sorted(findings, key=rank)
