"""A taskset of `verifiers`, as a package outside of Headway would ship it: reverse a word, then say it again."""

from collections.abc import Iterator

import verifiers.v1 as vf


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData]):
    @vf.stop
    async def one_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=2.0)
    async def share(self, trace: vf.Trace) -> float:
        reply = trace.last_reply
        return sum(a == b for a, b in zip(reply, self.data.answer, strict=False)) / len(self.data.answer)

    @vf.metric
    async def reply_length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ReverseConfig(vf.TasksetConfig):
    words: int = 4


class ReverseTaskset(vf.Taskset[ReverseTask, ReverseConfig]):
    def load(self) -> Iterator[ReverseTask]:
        for index in range(self.config.words):
            word = "abcdefgh"[index : index + 4]
            yield ReverseTask(ReverseData(prompt=word, answer=word[::-1]), self.config.task)


__all__ = ["ReverseTaskset"]
