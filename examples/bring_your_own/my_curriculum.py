"""A curriculum of one's own: it chooses tasks by index, and is told the mean reward of each finished group."""

from typing import Any


class UntilSolved:
    """Repeats the first tasks and adds one more whenever one of them is solved."""

    def __init__(self, tasks: int, seed: int, start: int = 4) -> None:
        self.tasks, self.known, self.drawn = tasks, min(start, tasks), 0

    def next(self) -> int:
        self.drawn += 1
        return self.drawn % self.known

    def report(self, index: int, reward: float) -> None:
        if reward > 0.9:
            self.known = min(self.known + 1, self.tasks)

    def save(self) -> dict[str, Any]:
        return {"known": self.known, "drawn": self.drawn}

    def load(self, state: dict[str, Any]) -> None:
        self.known, self.drawn = state["known"], state["drawn"]
