"""Math problems with one answer, which the package math-verify compares as mathematics (extra `math`)."""

import asyncio
import multiprocessing
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from fractions import Fraction
from importlib.util import find_spec
from typing import cast

from headway.base.errors import UsageError
from headway.base.extras import install_command
from headway.core.episodes import Task
from headway.core.messages import Message
from headway.core.rows import read_rows
from headway.envs.base import SingleTurn, reward
from headway.envs.bundled.problems import Split, distinct, opening

LIMIT_SECONDS = 20.0
"""For one comparison, of which math-verify itself allows five seconds each to reading and comparing."""
LONGEST_ANSWER = 20_000

INSTRUCTION = "Solve the problem. Put the final answer in \\boxed{}."


class Math(SingleTurn):
    """Solve problems; `1/2`, `0.5` and `\\frac{1}{2}` are the same answer. The last \\boxed{} of a reply counts.

    `path` is a JSONL or Parquet file, a folder of them, or a data set of the Hugging Face hub, with the columns
    `problem` and `answer`. Without one, sums of fractions and linear equations are made up.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        split: str = "train",
        problem: str = "problem",
        answer: str = "answer",
        num_tasks: int | None = None,
        seed: int = 0,
        system: str | None = INSTRUCTION,
    ) -> None:
        if find_spec("math_verify") is None:
            raise UsageError(f"math needs a package: {install_command('math')}")
        self._system = system
        pairs = _made_up(num_tasks or 512, split, seed) if path is None else _read(path, split, problem, answer)
        self._tasks = [Task(f"{i}", {"problem": text, "answer": gold}) for i, (text, gold) in enumerate(pairs)]
        self._tasks = self._tasks[:num_tasks]
        self._checker: ProcessPoolExecutor | None = None

    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def prompt(self, task: Task) -> list[Message]:
        return opening(self._system, task.data["problem"])

    @reward
    async def correct(self, task: Task, answer: str) -> float:
        """In a process of its own: an answer can be made so that it takes forever to simplify."""
        if self._checker is None:
            self._checker = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        work = asyncio.get_running_loop().run_in_executor(
            self._checker, is_correct, task.data["answer"], answer[-LONGEST_ANSWER:]
        )
        try:
            return float(await asyncio.wait_for(work, LIMIT_SECONDS))
        except (TimeoutError, BrokenProcessPool):
            self._stop()
            return 0.0

    async def close(self) -> None:
        self._stop()

    def _stop(self) -> None:
        """End the process; the next comparison starts another."""
        checker, self._checker = self._checker, None
        if checker is not None:
            for process in list((checker._processes or {}).values()):
                process.kill()
            checker.shutdown(wait=False, cancel_futures=True)


def is_correct(gold: str, answer: str) -> bool:
    """Tell whether the answer, in a text, is mathematically the given one."""
    from math_verify import parse, verify

    wanted = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$")
    # An empty reply parses to nothing, which verify takes to be equal to nothing.
    return bool(wanted) and bool(found := parse(answer)) and bool(verify(wanted, found))


def _read(path: str, split: str, problem: str, answer: str) -> list[tuple[str, str]]:
    pairs = []
    for row in read_rows(path, split):
        if row.error is not None or problem not in row.data or answer not in row.data:
            raise UsageError(
                f"math: {row.where} {row.error or f'has no {problem!r} and {answer!r}, but {sorted(row.data)}'}; "
                "name the columns with the arguments problem and answer"
            )
        # Some data sets have the way to the answer in the same column, and the answer after this mark.
        pairs.append((str(row.data[problem]), str(row.data[answer]).rpartition("####")[2].strip()))
    return pairs


def _made_up(count: int, split: str, seed: int) -> list[tuple[str, str]]:
    return distinct(_problem, lambda pair: pair[0], count, split=cast(Split, split), seed=seed)


def _problem(rng: random.Random) -> tuple[str, str]:
    a, b = Fraction(rng.randint(1, 20), rng.randint(2, 20)), Fraction(rng.randint(1, 20), rng.randint(2, 20))
    if rng.random() < 0.5:
        return f"What is {a} + {b}?", str(a + b)
    factor = rng.randint(2, 20)
    return f"For which x is {factor}x + {b} = {a}?", str((a - b) / factor)
