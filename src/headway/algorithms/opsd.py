"""On-policy self-distillation: the live policy, shown a demonstration, is the teacher of the policy without it."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from headway.algorithms.base import Algorithm, Group
from headway.algorithms.echo import branch_of
from headway.algorithms.reference import ReferenceModel
from headway.core.episodes import Task, Trace
from headway.core.errors import HeadwayError
from headway.core.messages import Message
from headway.core.samples import Sample
from headway.rendering.base import Renderer


class Opsd(Algorithm):
    """The teacher's prompt is the trace's, with the demonstration in its system message; what follows is unchanged.

    From the first sampled token on, teacher and student see the same tokens, so the logprobs align.
    """

    relative = False

    def __init__(self, teacher: ReferenceModel, renderer: Callable[[], Renderer], demonstration: str) -> None:
        self.teacher = teacher
        self.renderer = renderer
        self.demonstration = demonstration

    async def consult(self, group: Group) -> None:
        text = self._demonstration_of(group.task)
        await asyncio.gather(
            *(self._judge(trace, sample, text) for trace, sample in group.parts() if sample.sampled.any())
        )

    def _demonstration_of(self, task: Task) -> str:
        text = task.data.get(self.demonstration)
        if not isinstance(text, str) or not text:
            raise HeadwayError(
                f"opsd: task {task.id} has no text under {self.demonstration!r}; set algorithm.demonstration to "
                "the key of the task's data that holds one"
            )
        return text

    async def _judge(self, trace: Trace, sample: Sample, demonstration: str) -> None:
        branch = branch_of(trace, sample)
        first = next(position for position, index in enumerate(branch) if trace.nodes[index].sampled)
        prompt = [node.message for index in branch[:first] if (node := trace.nodes[index]).message is not None]
        shown = self.renderer().render(show(prompt, demonstration), generation_prompt=True).token_ids
        start = sum(len(trace.nodes[index].token_ids) for index in branch[:first])
        tail = sample.token_ids[start:].tolist()
        values = await self.teacher.logprobs(shown + tail, sample.temperature)
        aligned = np.zeros(len(sample), dtype=np.float32)
        aligned[start:] = values[len(shown) :]
        sample.ref_logprobs[:] = np.where(sample.sampled, aligned, 0.0)

    def score(self, group: Group) -> None:
        for _, sample in group.parts():
            sample.ref_kl_weight[sample.sampled] = 1.0

    async def close(self) -> None:
        await self.teacher.close()


def show(prompt: Sequence[Message], demonstration: str) -> list[Message]:
    """The conversation with the demonstration at the end of its system message, which is made if there is none."""
    hint = f"Here is a demonstration of a good answer:\n{demonstration}"
    if prompt and prompt[0].role == "system":
        return [Message("system", f"{prompt[0].content}\n\n{hint}"), *prompt[1:]]
    return [Message("system", hint), *prompt]
