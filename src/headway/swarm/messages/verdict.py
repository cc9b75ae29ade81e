"""Verdicts on contributions."""

import msgspec


class Verdict(msgspec.Struct, frozen=True):
    """The outcome of verification: accepted, or refused by the check of this name, and why.

    `rescored` says that the trusted model computed all tokens again, `tokens` how many were sampled.
    """

    accepted: bool
    check: str = ""
    reason: str = ""
    rescored: bool = False
    tokens: int = 0
