"""Events of a swarm, which its ledger keeps and its trust follows from. Keys of workers are hex."""

import msgspec

from headway.swarm.messages.verdict import Verdict


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The run begins, or goes on: `key` signs the ledger, `commitment` is that of the secret behind all orders."""

    run: str
    key: str
    commitment: str


class Ordered(msgspec.Struct, frozen=True, tag="ordered"):
    """A worker was given an order: the `number`-th of this version, whose weights have this fingerprint."""

    worker: str
    order: str
    version: int
    fingerprint: str
    number: int


class Judged(msgspec.Struct, frozen=True, tag="judged"):
    """A contribution with this SHA-256 got its verdict."""

    worker: str
    order: str
    contribution: str
    verdict: Verdict


class CutOff(msgspec.Struct, frozen=True, tag="cut_off"):
    """A worker gets no more orders, and what it sent without being rescored is dropped."""

    worker: str
    reason: str


class Retired(msgspec.Struct, frozen=True, tag="retired"):
    """Versions up to this one are no longer used: their open orders are void."""

    version: int


Event = Opened | Ordered | Judged | CutOff | Retired
