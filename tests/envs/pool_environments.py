"""Environments that behave, and ones that don't, for tests of the worker pool."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from headway.envs.base import Environment, Message, SingleTurn, Task, ToolUse, reward, tool


class Echo(SingleTurn):
    """Rewards a reply that repeats the word. Misbehaves as the task's `do` says."""

    def __init__(self, n: int = 4, delay: float = 0.0) -> None:
        self.n = n
        self.delay = delay

    def tasks(self) -> list[Task]:
        return [Task(str(i), {"word": f"w{i}"}) for i in range(self.n)]

    def prompt(self, task: Task) -> str:
        return f"say {task.data.get('word', '')}"

    async def run(self, task, policy):
        await asyncio.sleep(self.delay)
        misbehave = MISBEHAVIOUR.get(task.data.get("do", ""))
        if misbehave:
            await misbehave()
        return await super().run(task, policy)

    @reward
    def same(self, task: Task, answer: str) -> bool:
        return answer == task.data.get("word")


async def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def die_and_leave_a_child() -> None:
    await asyncio.create_subprocess_exec("sleep", "600.25")
    await die()


async def start_a_daemon() -> None:
    """Start a process in a session of its own, whose parent ends at once."""
    code = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(600.125)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    await process.wait()
    await asyncio.create_subprocess_exec("sleep", "600.125")


async def hang_the_loop() -> None:
    ctypes.PyDLL(None).sleep(600)  # holds the interpreter lock: nothing else runs in this process


async def sleep_long() -> None:
    await asyncio.sleep(600)


async def ignore_cancellation() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)


async def leave_by_exit() -> None:
    sys.exit(3)


async def eat_memory() -> None:
    hoard = []
    while True:
        hoard.append(bytearray(64 << 20))


async def print_a_lot() -> None:
    print("x" * (1 << 20))
    for _ in range(5000):
        print("line")


MISBEHAVIOUR = {
    "die": die,
    "die and leave a child": die_and_leave_a_child,
    "start a daemon": start_a_daemon,
    "hang": hang_the_loop,
    "sleep": sleep_long,
    "ignore": ignore_cancellation,
    "exit": leave_by_exit,
    "memory": eat_memory,
    "print": print_a_lot,
}


class BadRewards(SingleTurn):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def tasks(self) -> list[Task]:
        return [Task("0")]

    def prompt(self, task: Task) -> str:
        return "go"

    @reward
    async def judged(self) -> object:
        if self.kind == "raise":
            raise KeyError("answer")
        return {"nan": float("nan"), "text": "good", "none": None, "infinite": float("inf")}[self.kind]


class Tools(ToolUse):
    tool_timeout = 0.3
    max_output = 100

    def tasks(self) -> list[Task]:
        return [Task("0")]

    def prompt(self, task: Task) -> str:
        return "go"

    def start(self, state) -> None:
        state.sums = []

    @tool
    def add(self, a: int, b: int, state) -> int:
        """Add two numbers.

        Args:
            a: the first number
            b: the second one
        """
        state.sums.append(a + b)
        return a + b

    @tool
    def broken(self) -> str:
        """Always fails."""
        raise RuntimeError("out of order")

    @tool
    def hanging(self) -> str:
        """Never comes back in time."""
        time.sleep(3)
        return "late"

    @tool
    async def hanging_async(self) -> str:
        """Never comes back in time."""
        await asyncio.sleep(600)
        return "late"

    @tool
    def flood(self) -> str:
        """Prints and returns a megabyte."""
        print("y" * (1 << 20))
        return "z" * (1 << 20)

    @reward
    def sums(self, state) -> float:
        return float(sum(state.sums))


class NoTasks(SingleTurn):
    def tasks(self) -> list[Task]:
        return []

    def prompt(self, task: Task) -> str:
        return ""


class Untyped(ToolUse):
    def tasks(self) -> list[Task]:
        return [Task("0")]

    def prompt(self, task: Task) -> str:
        return ""

    @tool
    def look(self, where):
        """Its parameter has no type."""


class Toolless(NoTasks, ToolUse):
    pass


class Fragile(Echo):
    """Cannot be built any more once the file `broken` exists."""

    def __init__(self, broken: str) -> None:
        super().__init__()
        if Path(broken).exists():
            raise RuntimeError("the data is gone")


class Hanging(ToolUse):
    tool_timeout = 0.05

    def tasks(self) -> list[Task]:
        return [Task("0")]

    def prompt(self, task: Task) -> str:
        return "go"

    @tool
    def wait(self) -> None:
        """Hangs for good."""
        threading.Event().wait()


class Needy(SingleTurn):
    def __init__(self, required: int) -> None:
        self.required = required

    def tasks(self) -> list[Task]:
        return [Task("0")]

    def prompt(self, task: Task) -> str:
        return ""


class Twins(Needy):
    def tasks(self) -> list[Task]:
        return [Task("a"), Task("a")]


class Unsendable(Needy):
    def tasks(self) -> list[Task]:
        return [Task("a", {"data": object()})]


class NotTasks(Needy):
    def tasks(self) -> list[Task]:
        return ["a"]  # type: ignore[list-item]


class NotAnEnvironment:
    pass


class Duel(Environment):
    """Two agents, one of them twice; each is rewarded for its own words."""

    def tasks(self) -> list[Task]:
        return [Task("0")]

    async def run(self, task, policy):
        proposal = await policy.agent("proposer").chat("propose")
        policy.agent("proposer").reward("made", 1.0, weight=0.5)
        for index in range(2):
            solver = policy.agent("solver", index)
            solver.trace.problem = proposal.content
            await solver.chat([Message("user", proposal.content)])

    @reward(agent="solver")
    def solved(self, answer: str) -> bool:
        return answer == "yes"


class Variables(SingleTurn):
    """Writes its environment variables into a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def tasks(self) -> list[Task]:
        Path(self.file).write_text("\n".join(os.environ))
        return [Task("0")]

    def prompt(self, task: Task) -> str:
        return "hello"


class Count(ToolUse):
    """A long conversation, which sums up numbers."""

    max_turns = 100

    def tasks(self) -> list[Task]:
        return [Task("0")]

    def prompt(self, task: Task) -> str:
        return "count"

    def start(self, state) -> None:
        state.sum = 0

    @tool
    def add(self, n: int, state) -> str:
        """Add a number to the sum; one that the task names kills the worker."""
        if n == state.task.data.get("kills"):
            os.kill(os.getpid(), signal.SIGKILL)
        state.sum += n
        return f"the sum is {state.sum}"

    @reward
    def total(self, state) -> float:
        return float(state.sum)


class CountOnce(Count):
    resumable = False


class CountDifferently(Count):
    """Never asks the same."""

    def prompt(self, task: Task) -> str:
        return f"count at {time.monotonic()}"
