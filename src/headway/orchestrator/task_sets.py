"""Task sets: files that name some of an environment's tasks, such as those that a model sometimes solves."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.base.errors import UsageError
from headway.base.files import write_atomic
from headway.core.episodes import Episode, Task
from headway.orchestrator.tally import passed


class TaskRate(msgspec.Struct, frozen=True):
    """One line of a task set: the task's id, and how often a model solved it when the set was made."""

    task: str
    rate: float
    rewards: list[float] = []


def task_rate(task: Task, episodes: Sequence[Episode], *, by_reward: bool) -> TaskRate | None:
    """Compute the share of episodes that solved the task, or with `by_reward` their mean reward; None where all failed.

    Episodes that failed count for nothing: they say something about servers, not about the task.
    """
    whole = [episode for episode in episodes if episode.error is None]
    if not whole:
        return None
    rewards = [episode.reward for episode in whole]
    total = sum(rewards) if by_reward else sum(map(passed, whole))
    return TaskRate(task.id, total / len(whole), rewards)


def write_task_set(rates: Sequence[TaskRate], file: Path) -> None:
    write_atomic(file, b"".join(msgspec.json.encode(rate) + b"\n" for rate in rates))


def select_tasks(tasks: Sequence[Task], file: Path | None) -> Sequence[Task]:
    """Return the tasks that a task set names, in its order; all of them without a file."""
    if file is None:
        return tasks
    try:
        lines = [line for line in file.read_bytes().splitlines() if line.strip()]
        wanted = [msgspec.json.decode(line, type=TaskRate).task for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"task_set {file} cannot be read ({error}); `headway env filter` writes one") from error
    known = {task.id: task for task in tasks}
    missing = [name for name in wanted if name not in known]
    if missing or not wanted:
        first = f"{missing[0]!r} and {len(missing) - 1} others are not" if missing else "nothing is"
        raise UsageError(
            f"task_set {file}: {first} among the environment's {len(tasks)} tasks; use the same args that it was made "
            "with, or make it again"
        )
    return [known[name] for name in wanted]
