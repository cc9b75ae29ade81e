"""OPD, on-policy distillation (https://arxiv.org/abs/2306.13649): a frozen teacher scores what the policy sampled."""

import asyncio

from headway.algorithms.base import Algorithm, Group
from headway.algorithms.reference import ReferenceModel
from headway.base.errors import HeadwayError
from headway.core.episodes import Trace
from headway.core.samples import Sample


class Opd(Algorithm):
    """Writes the teacher's logprobs of the sampled tokens, for the ref_kl loss."""

    relative = False

    def __init__(self, teacher: ReferenceModel) -> None:
        self.teacher = teacher

    async def query_references(self, group: Group) -> None:
        await asyncio.gather(
            *(self._query(group, trace, sample) for trace, sample in group.samples() if sample.sampled.any())
        )

    async def _query(self, group: Group, trace: Trace, sample: Sample) -> None:
        if any(trace.nodes[index].images for index in sample.nodes):
            raise HeadwayError("reference models can't be asked about images yet: choose an algorithm without one")
        shown, start = self.teacher_prompt(group, trace, sample)
        values = await self.teacher.logprobs(shown + sample.token_ids[start:].tolist(), sample.temperature)
        sample.ref_logprobs[start:] = values[len(shown) :]
        sample.ref_logprobs[~sample.sampled] = 0.0

    def teacher_prompt(self, group: Group, trace: Trace, sample: Sample) -> tuple[list[int], int]:
        """Return what the teacher sees instead of the sample's first tokens, and how many tokens that replaces."""
        return [], 0

    def score(self, group: Group) -> None:
        for _, sample in group.samples():
            sample.ref_kl_weight[sample.sampled] = 1.0

    async def close(self) -> None:
        await self.teacher.close()
