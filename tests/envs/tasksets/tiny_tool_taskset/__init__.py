"""A taskset of `verifiers` with a tool server: add two numbers."""

from collections.abc import Iterator

import verifiers.v1 as vf

from tiny_tool_taskset.server import AddState, AddToolset


class AddData(vf.TaskData):
    answer: str


class AddTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class AddTask(vf.Task[AddData, AddState, AddTaskConfig]):
    @classmethod
    def toolsets(cls, config: AddTaskConfig) -> list[vf.Toolset]:
        return [AddToolset(config.tools)]

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class AddConfig(vf.TasksetConfig):
    task: AddTaskConfig = AddTaskConfig()


class AddTaskset(vf.Taskset[AddTask, AddConfig]):
    def load(self) -> Iterator[AddTask]:
        for number in range(3):
            yield AddTask(AddData(prompt=f"{number} plus 40?", answer=str(number + 40)), self.config.task)


__all__ = ["AddTaskset"]
