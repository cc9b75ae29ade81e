"""The environment with a tool as a verifiers taskset."""

from collections.abc import Iterator

import verifiers.v1 as vf
from bench_tools import CalcToolset


class CalcData(vf.TaskData):
    answer: str


class CalcTask(vf.Task[CalcData]):
    @vf.stop
    async def after_four_turns(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 4

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class CalcConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class BenchCalculatorTaskset(vf.Taskset[CalcTask, CalcConfig]):
    @classmethod
    def toolsets(cls, config: CalcConfig) -> list[vf.Toolset]:
        return [CalcToolset(config.tools)]

    def load(self) -> Iterator[CalcTask]:
        for i in range(64):
            data = CalcData(prompt=f"Add {i} and 40 with the tool.", answer=str(40 + i))
            yield CalcTask(data, self.config.task)


__all__ = ["BenchCalculatorTaskset"]
