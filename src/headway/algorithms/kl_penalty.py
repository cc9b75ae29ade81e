"""A KL penalty: beside what an algorithm does, the policy is kept near a frozen model."""

from collections.abc import Sequence
from typing import Any

from headway.algorithms.base import Algorithm, Group
from headway.algorithms.opd import Opd
from headway.algorithms.reference import ReferenceModel


class KlPenalty(Opd):
    """Adds to `inner` the ref_kl loss, with weight `coefficient`, on the tokens that its rl loss counts.

    The gradient of that loss is an estimate, by the sampled tokens, of the gradient of KL(policy, reference).
    """

    def __init__(self, inner: Algorithm, reference: ReferenceModel, coefficient: float) -> None:
        super().__init__(reference)
        self.inner, self.coefficient = inner, coefficient
        self.relative, self.sampler = inner.relative, inner.sampler

    async def query_references(self, group: Group) -> None:
        await self.inner.query_references(group)
        await super().query_references(group)

    def score(self, group: Group) -> None:
        self.inner.score(group)

    def finish_batch(self, groups: Sequence[Group]) -> None:
        """Weigh the tokens only now: a group whose rewards are all equal is no use, and the filters must see that."""
        self.inner.finish_batch(groups)
        for group in groups:
            for _, sample in group.samples():
                sample.ref_kl_weight[sample.sampled & (sample.rl_weight != 0)] = self.coefficient

    def save(self) -> dict[str, Any]:
        return self.inner.save()

    def load(self, state: dict[str, Any]) -> None:
        self.inner.load(state)

    async def close(self) -> None:
        await self.inner.close()
        await super().close()
