"""Progress bars for long work: shown on a terminal, silent everywhere else."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


def progress(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Pass `items` through, with a bar that counts them. `total` defaults to their length where there is one."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress_bar(description, total) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def progress_bar(description: str, total: int | None = None) -> Iterator[Callable[[float], None]]:
    """Yield a function that advances a bar by some amount."""
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.update(task, advance=amount)
