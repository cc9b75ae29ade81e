"""A queue in front of the trusted model: contributions that wait at the same time share its passes. A short reply alone
leaves a GPU idle, and of most contributions one reply is computed again."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headway.core.episodes import Trace
from headway.models.decoder import DecoderLM
from headway.swarm.messages.orders import Contribution, Precision, WorkOrder
from headway.swarm.messages.proofs import count_proven
from headway.swarm.trust.rescore import rescore_all
from headway.swarm.trust.rescored import Rescored

ModelOf = Callable[[int, Precision], DecoderLM]
"""Returns the trusted model of a version, in the precision that a worker computed in."""
SeededTraces = list[tuple[Trace, int]]
"""Traces, each with the seed of its episode."""


class _Kind(NamedTuple):
    """The model and the temperature that contributions of one pass share."""

    version: int
    precision: Precision
    temperature: float


class _Waiting(NamedTuple):
    traces: SeededTraces
    future: "asyncio.Future[Rescored]"


class RescoringQueue:
    """Computes the sampled tokens of contributions again, all that wait for the same model together.

    It runs one computation at a time, in a thread. While one runs, others gather: the busier it is, the less each
    costs, and one that comes when it is idle waits for nobody.
    """

    def __init__(self, model_of: ModelOf) -> None:
        self._model_of = model_of
        self._waiting: dict[_Kind, list[_Waiting]] = {}
        self._running: asyncio.Task[None] | None = None

    async def rescore(self, order: WorkOrder, contribution: Contribution) -> Rescored:
        """Compute all sampled tokens of a contribution again. It must have passed the check of its form. Raises
        HeadwayError where there is no model of its version any more."""
        kind = _Kind(order.version, contribution.precision, order.sampling.temperature)
        future: asyncio.Future[Rescored] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(kind, []).append(_Waiting(seeded_traces(order, contribution), future))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                kind = next(iter(self._waiting))
                await self._serve(kind, self._waiting.pop(kind))
        finally:
            self._running = None
            self._waiting.clear()

    async def _serve(self, kind: _Kind, waiting: Sequence[_Waiting]) -> None:
        try:
            found = await asyncio.to_thread(self._compute, kind, [each.traces for each in waiting])
        except Exception as error:
            for each in waiting:
                if not each.future.done():
                    each.future.set_exception(error)
            return
        for each, rescored in zip(waiting, found, strict=True):
            if not each.future.done():  # done: who waited for it is gone
                each.future.set_result(rescored)

    def _compute(self, kind: _Kind, groups: Sequence[SeededTraces]) -> list[Rescored]:
        model = self._model_of(kind.version, kind.precision)
        whole = rescore_all(model, [seeded for traces in groups for seeded in traces], kind.temperature)
        tokens = [sum(_count_sampled(trace) for trace, _ in traces) for traces in groups]
        states = [sum(count_proven(trace) for trace, _ in traces) for traces in groups]
        return whole.split(tokens, states)


def seeded_traces(order: WorkOrder, contribution: Contribution) -> SeededTraces:
    """Return the traces of a contribution, each with its seed."""
    pairs = zip(order.seeds, contribution.episodes, strict=True)
    return [(trace, seed) for seed, episode in pairs for trace in episode.traces]


def _count_sampled(trace: Trace) -> int:
    return sum(len(node.token_ids) for node in trace.nodes if node.sampled)
