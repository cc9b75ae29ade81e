"""OPSD, on-policy self-distillation: the policy, shown a demonstration, is the teacher of the policy without it."""

from collections.abc import Callable, Sequence

from headway.algorithms.base import Group
from headway.algorithms.opd import Opd
from headway.algorithms.reference import ReferenceModel
from headway.base.errors import HeadwayError
from headway.core.episodes import Task, Trace
from headway.core.messages import Message
from headway.core.samples import Sample
from headway.rendering.base import Renderer


class Opsd(Opd):
    """The teacher's prompt is the trace's, with the demonstration in its system message; what follows is unchanged.

    From the first sampled token on, teacher and student see the same tokens, so the logprobs align.
    """

    def __init__(self, teacher: ReferenceModel, renderer: Callable[[], Renderer], demonstration: str) -> None:
        super().__init__(teacher)
        self.renderer = renderer
        self.demonstration = demonstration

    def teacher_prompt(self, group: Group, trace: Trace, sample: Sample) -> tuple[list[int], int]:
        spans = trace.spans(sample.nodes)
        first = next(place for place, (node, _, _) in enumerate(spans) if node.sampled)
        prompt = [node.message for node, _, _ in spans[:first] if node.message is not None]
        messages = show(prompt, self._demonstration_of(group.task))
        return self.renderer().render(messages, generation_prompt=True).token_ids, spans[first][1]

    def _demonstration_of(self, task: Task) -> str:
        text = task.data.get(self.demonstration)
        if not isinstance(text, str) or not text:
            raise HeadwayError(
                f"opsd: task {task.id} has no text under {self.demonstration!r}; set algorithm.demonstration to "
                "the key of the task's data that holds one"
            )
        return text


def show(prompt: Sequence[Message], demonstration: str) -> list[Message]:
    """Append the demonstration to the conversation's system message, which is added if there is none."""
    hint = f"Here is a demonstration of a good answer:\n{demonstration}"
    if prompt and prompt[0].role == "system":
        return [Message("system", f"{prompt[0].content}\n\n{hint}"), *prompt[1:]]
    return [Message("system", hint), *prompt]
