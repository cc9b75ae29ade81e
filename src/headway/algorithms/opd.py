"""On-policy distillation: a frozen teacher judges the tokens that the policy sampled."""

import asyncio

import numpy as np

from headway.algorithms.base import Algorithm, Group
from headway.algorithms.reference import ReferenceModel
from headway.core.samples import Sample


class Opd(Algorithm):
    """The teacher's logprobs of the sampled tokens, for the ref_kl loss."""

    relative = False

    def __init__(self, teacher: ReferenceModel) -> None:
        self.teacher = teacher

    async def consult(self, group: Group) -> None:
        await asyncio.gather(*(self._judge(sample) for _, sample in group.parts() if sample.sampled.any()))

    async def _judge(self, sample: Sample) -> None:
        values = await self.teacher.logprobs(sample.token_ids.tolist(), sample.temperature)
        sample.ref_logprobs[:] = np.where(sample.sampled, np.asarray(values, dtype=np.float32), 0.0)

    def score(self, group: Group) -> None:
        for _, sample in group.parts():
            sample.ref_kl_weight[sample.sampled] = 1.0

    async def close(self) -> None:
        await self.teacher.close()
