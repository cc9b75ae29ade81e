"""Messages and routes between contributors and a run, over HTTP: terms, orders, uploads, standings.

| route | request | answer |
|---|---|---|
| `GET /v1/terms` | | `SwarmTerms`, signed by the run |
| `POST /v1/orders` | `WorkRequest`, signed | `WorkOrder`, signed by the run; 204 where there is no work now |
| `POST /v1/contributions` | `Contribution`, signed | `Answer` |
| `GET /v1/standing` | | `WorkerStanding` of the key that asks |
| `GET /v1/versions` | | `VersionNotice` |
| `GET /v1/versions/N/manifest` | | `WeightManifest`, signed by the run |
| `GET /v1/versions/N/shards/I` | ranges | bytes |

Bodies are canonical MessagePack. Every request carries `Authorization: Headway KEY TIME SIGNATURE`: the contributor's
key signs method, path, time and the hash of the body. No route takes, or answers with, the run's token.
"""

from typing import Any

import msgspec

from headway.swarm.messages.orders import Precision
from headway.swarm.messages.verdict import Verdict

REMEMBERED_REFUSALS = 8
LONGEST_REQUEST = 4096
"""Bytes of a request for work."""


class SwarmTerms(msgspec.Struct, frozen=True):
    """All that a contributor must know before it works: the environment, how messages become tokens, and the relays.

    `env` is the name in orders, `env_id` and `args` what it is made of. `context` are the tokens of a conversation.
    """

    run: str
    env: str
    env_id: str
    args: dict[str, Any]
    renderer: str
    context: int
    precisions: tuple[Precision, ...]
    relays: tuple[str, ...] = ()


class WorkRequest(msgspec.Struct, frozen=True):
    """A worker's request for an order of this run, which it signs."""

    run: str


class Answer(msgspec.Struct, frozen=True):
    """The verdict on a contribution, and what its worker has earned so far."""

    verdict: Verdict
    accepted: int
    refused: int
    tokens: int


class WorkerStanding(msgspec.Struct, frozen=True):
    """A worker's record: what it earned, in contributions and tokens, and why the last ones were refused."""

    accepted: int = 0
    refused: int = 0
    abandoned: int = 0
    tokens: int = 0
    strikes: int = 0
    cut_off: bool = False
    refusals: tuple[str, ...] = ()
