"""Tasks of environments: checked where they are listed, and read from files of rows."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from headway.base.errors import HeadwayError, UsageError
from headway.core.episodes import Task
from headway.core.rows import read_rows

Split = Literal["train", "eval"]

_EVAL_SHARE = 8  # one problem in eight is kept for evaluation


def in_split(key: str, split: Split) -> bool:
    """Tell whether the problem called `key` belongs to `split`.

    Decided by a checksum of the problem itself, so that no seed can bring a problem into both.
    """
    held_out = zlib.crc32(key.encode()) % _EVAL_SHARE == 0
    return held_out == (split == "eval")


def read_tasks(path: str | Path, id: str, split: Split | None = None) -> list[Task]:
    """Read tasks from a JSONL or Parquet file, a folder of them, or a data set of the Hugging Face hub: one per row.

    The column `id` names a task. With a `split`, one task in eight is kept for "eval" and the others are "train",
    decided by its name. Raises UsageError that says which row is wrong.
    """
    if split not in ("train", "eval", None):
        raise UsageError(f'split must be "train" or "eval" (got "{split}")')
    tasks = []
    for row in read_rows(str(path)):
        if row.error is not None or row.data.get(id) in (None, ""):
            raise UsageError(f"{row.where}: {row.error or f'the column {id!r}, which names a task, is missing'}")
        name = str(row.data[id])
        if split is None or in_split(name, split):
            tasks.append(Task(name, row.data))
    return tasks


def check_tasks(env: str, tasks: Sequence[Task]) -> None:
    """Raise HeadwayError unless there are tasks, of the right type and with different ids."""
    if not tasks:
        raise HeadwayError(f'environment "{env}" has no tasks')
    seen: set[str] = set()
    for task in tasks:
        if not isinstance(task, Task):
            raise HeadwayError(f'environment "{env}": tasks() must give Task objects, not {type(task).__name__}')
        if task.id in seen:
            raise HeadwayError(f'environment "{env}" has two tasks with the id {task.id!r}')
        seen.add(task.id)
