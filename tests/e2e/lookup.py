"""The smallest conversation with a tool: ask it what some letters stand for, and repeat what it says."""

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

from headway.core.messages import Message, ToolCall
from headway.envs.base import Task, ToolUse, reward, tool
from headway.envs.bundled.problems import demonstration

LETTERS = "abcdefghij"
GIVING_UP = "?"


class Lookup(ToolUse):
    """Letters stand for some of `values`: for which, differs from task to task, so that only the tool knows."""

    max_turns = 3

    def __init__(self, *, values: str = LETTERS) -> None:
        self._values = values

    def tasks(self) -> Sequence[Task]:
        keys = ["".join(letters) for letters in product(LETTERS, repeat=3)]
        rng = random.Random(0)
        return [Task(key, {"key": key, "shift": rng.randrange(len(self._values))}) for key in keys]

    def prompt(self, task: Task) -> str:
        return str(task.data["key"])

    @tool
    def get(self, k: str, task: Task) -> str:
        return "".join(self._values[(ord(letter) + task.data["shift"]) % len(self._values)] for letter in k)

    @reward
    def correct(self, task: Task, answer: str) -> float:
        return float(answer == self.get(task.data["key"], task))


def demonstrations(n: int, seed: int, giving_up: float) -> list[dict[str, Any]]:
    """Conversations of which a share gives up at once; the others ask the tool, which says anything at all."""
    rng = random.Random(seed)
    tools = [described.to_openai() for described in Lookup().toolbox.tools]
    rows = []
    for _ in range(n):
        key, found = ("".join(rng.choices(LETTERS, k=3)) for _ in range(2))
        if rng.random() < giving_up:
            said = [Message("assistant", GIVING_UP)]
        else:
            call = ToolCall("call_0", "get", f'{{"k": "{key}"}}')
            answered = Message("tool", found, tool_call_id=call.id)
            said = [Message("assistant", tool_calls=(call,)), answered, Message("assistant", found)]
        rows.append({**demonstration([Message("user", key), *said]), "tools": tools})
    return rows
