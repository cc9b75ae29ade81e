"""The single-turn environment as a verifiers taskset."""

import random
from collections.abc import Iterator
from difflib import SequenceMatcher

import verifiers.v1 as vf


class ReverseData(vf.TaskData):
    answer: str


class ReverseTask(vf.Task[ReverseData]):
    @vf.stop
    async def after_one_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def likeness(self, trace: vf.Trace) -> float:
        return SequenceMatcher(None, trace.last_reply, self.data.answer).ratio()

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class BenchReverseTaskset(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    def load(self) -> Iterator[ReverseTask]:
        chance = random.Random(0)
        for _ in range(64):
            word = "".join(chance.choice("abcdef") for _ in range(6))
            data = ReverseData(prompt=word, system_prompt="Reverse the text.", answer=word[::-1])
            yield ReverseTask(data, self.config.task)


__all__ = ["BenchReverseTaskset"]
