"""Work of a swarm: the terms of a run, the orders that follow from them, and what workers send back."""

import hmac
from typing import Literal

import msgspec

from headway.base.errors import UsageError
from headway.core.episodes import Episode, EpisodeRequest, Task
from headway.core.protocol import SamplingParams
from headway.swarm.messages.canonical import digest

Precision = Literal["float32", "bfloat16"]

LARGEST_SEED = 2**62
"""Calls of an episode add to its seed, which stays a signed 64-bit number for everyone's decoder."""


class WorkOrder(msgspec.Struct, frozen=True):
    """One group of episodes for one worker: `task` with the weights of `version`, an episode for each of `seeds`.

    `number` counts the worker's orders of that version. `context` are the tokens that a conversation may have.
    """

    run: str
    worker: bytes
    env: str
    version: int
    fingerprint: str
    number: int
    task: Task
    seeds: tuple[int, ...]
    sampling: SamplingParams
    context: int

    @property
    def id(self) -> str:
        return digest(self)[:32]

    def request(self, index: int, timeout: float = 600.0) -> EpisodeRequest:
        """Return the request of episode `index`, as an environment's runner takes it."""
        return EpisodeRequest(
            episode_id=f"{self.id}-{index}",
            group_id=self.id,
            task=self.task,
            engines=[],
            version=self.version,
            sampling=msgspec.structs.replace(self.sampling, seed=self.seeds[index]),
            timeout=timeout,
        )


class Contribution(msgspec.Struct):
    """A worker's answer to the order of this id: all its episodes, in the order of the seeds, the precision that it
    computed in, and a proof of its activations for each episode (`messages.proofs`)."""

    order: str
    precision: Precision
    episodes: list[Episode]
    proofs: list[bytes] = msgspec.field(default_factory=list)


class RunTerms:
    """The part of orders that a run fixes. Tasks and seeds follow from `secret`, the worker's key, the version and the
    order's number: nobody can choose them, nor know them before the order is given.

    `commitment` can be published at the start and the secret at the end: then anyone can derive every order again.
    """

    def __init__(
        self,
        run: str,
        secret: bytes,
        env: str,
        tasks: list[Task],
        group_size: int,
        sampling: SamplingParams,
        context: int,
    ) -> None:
        check_sampling(sampling)
        if not tasks or group_size < 1 or len(secret) < 16:
            raise UsageError("a swarm needs tasks, groups of at least 1 episode and a secret of at least 16 bytes")
        self.run, self.env, self.tasks = run, env, tasks
        self._secret, self._group_size, self._sampling, self._context = secret, group_size, sampling, context

    @property
    def commitment(self) -> str:
        return self._derive("commitment").hex()

    def order(self, worker: bytes, version: int, fingerprint: str, number: int) -> WorkOrder:
        """Derive order `number` of a worker at a version; the same one every time."""
        of = (worker.hex(), fingerprint, version, number)
        index = int.from_bytes(self._derive("task", *of)[:16]) % len(self.tasks)
        seeds = (self._derive("seed", *of, i) for i in range(self._group_size))
        return WorkOrder(
            run=self.run,
            worker=worker,
            env=self.env,
            version=version,
            fingerprint=fingerprint,
            number=number,
            task=self.tasks[index],
            seeds=tuple(int.from_bytes(seed[:8]) % LARGEST_SEED for seed in seeds),
            sampling=self._sampling,
            context=self._context,
        )

    def is_rescored(self, order: str, share: float) -> bool:
        """Decide if the answer to an order belongs to the `share` that is rescored. Workers can't tell before."""
        return int.from_bytes(self._derive("rescored", order)[:8]) < share * 2**64

    def spot(self, order: str) -> int:
        """Choose the episode that is computed again of an answer that is not rescored. Workers can't tell before."""
        return int.from_bytes(self._derive("spot", order)[:16]) % self._group_size

    def _derive(self, *words: str | int) -> bytes:
        return hmac.digest(self._secret, msgspec.msgpack.encode([self.run, *words]), "sha256")


def check_sampling(sampling: SamplingParams) -> None:
    """Raise UsageError where replies could not be checked: filters and shapes change the distribution in ways that the
    checks do not repeat, and greedy replies are not drawn."""
    if not 0.1 <= sampling.temperature <= 10:
        raise UsageError(f"a swarm samples at a temperature of 0.1 to 10 (got {sampling.temperature:g})")
    if sampling.top_p != 1 or sampling.top_k != 0 or sampling.min_p != 0 or sampling.shaped or sampling.ignore_eos:
        raise UsageError("a swarm samples from the whole distribution: leave top_p, top_k, min_p and shapes alone")
    if sampling.max_tokens is None or sampling.n != 1 or sampling.logprobs != 0:
        raise UsageError("a swarm needs sampling.max_tokens, n = 1 and the logprobs of sampled tokens alone")
