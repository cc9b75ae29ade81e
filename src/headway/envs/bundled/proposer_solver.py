"""A proposer writes arithmetic problems, solvers try them; problems of middling difficulty pay best."""

import asyncio
import random
import re
from collections.abc import Sequence

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.core.messages import Message
from headway.envs.base import Environment, Policy
from headway.envs.bundled.arithmetic import evaluate, last_number, random_expression
from headway.envs.bundled.problems import Row, demonstration, opening

PROPOSE = "write a problem: {terms} numbers up to {largest}, with {operators}"
SOLVE = "solve: {problem}"
SYSTEM = "To write a problem, reply with the expression only, such as 12 + 7. To solve one, reply with the number only."


class ProposerSolver(Environment):
    """`solvers` agents answer the proposer's problem. A task asks for a number of terms and an operator.

    The proposer's reward is 4p(1 - p) for a share p of right answers, and a little for keeping to the format;
    a solver's is 1 for the right answer. Solvers are compared on the problem, which their traces name.
    """

    def __init__(self, *, solvers: int = 4, max_terms: int = 4, largest: int = 20, system: str | None = SYSTEM) -> None:
        if solvers < 2 or max_terms < 2 or largest < 1:
            raise UsageError("proposer-solver: solvers and max_terms must be at least 2, largest at least 1")
        self._solvers = solvers
        self._max_terms = max_terms
        self._largest = largest
        self._system = system

    def tasks(self) -> Sequence[Task]:
        return [
            Task(f"{terms}{operators}", {"terms": terms, "operators": operators, "largest": self._largest})
            for terms in range(2, self._max_terms + 1)
            for operators in ("+", "-", "*", "+-", "+*", "-*", "+-*")
        ]

    async def run(self, task: Task, policy: Policy) -> None:
        proposer = policy.agent("proposer")
        proposal = await proposer.chat(opening(self._system, PROPOSE.format(**task.data)))
        problem = parse_problem(proposal.content, **task.data)
        proposer.reward("valid", float(problem is not None), weight=0.1)
        if problem is None:
            proposer.reward("difficulty", 0.0)
            return
        scores = await asyncio.gather(*(self._solve(policy.agent("solver", i), problem) for i in range(self._solvers)))
        share = sum(scores) / len(scores)
        proposer.reward("difficulty", 4 * share * (1 - share))

    async def _solve(self, solver: Policy, problem: str) -> float:
        solver.trace.problem = problem
        reply = await solver.chat(opening(self._system, SOLVE.format(problem=problem)))
        right = float(last_number(reply.content) == evaluate(problem))
        solver.reward("correct", right)
        return right


def parse_problem(text: str, *, terms: int, operators: str, largest: int) -> str | None:
    """The proposed expression, tidied, if the last line of `text` is one that was asked for; else None."""
    line = (text.strip().splitlines() or [""])[-1].strip()
    if not re.fullmatch(r"\d{1,9}( ?[+*-] ?\d{1,9})*", line):
        return None
    numbers, signs = re.findall(r"\d+", line), re.findall(r"[+*-]", line)
    if len(numbers) != terms or not set(signs) <= set(operators) or max(map(int, numbers)) > largest:
        return None
    tidy = [str(int(numbers[0]))]
    for sign, number in zip(signs, numbers[1:], strict=True):
        tidy += [sign, str(int(number))]
    return " ".join(tidy)


def demonstrations(n: int, seed: int = 0, *, largest: int = 20, system: str | None = SYSTEM) -> list[Row]:
    """`n` conversations, of proposers and solvers in turn."""
    rng = random.Random(seed)
    tasks = ProposerSolver(largest=largest).tasks()
    rows = []
    for i in range(n):
        asked = rng.choice(tasks).data
        problem = random_expression(rng, asked["terms"], largest, asked["operators"])
        said = (
            (PROPOSE.format(**asked), problem)
            if i % 2 == 0
            else (SOLVE.format(problem=problem), str(evaluate(problem)))
        )
        rows.append(demonstration([*opening(system, said[0]), Message("assistant", said[1])]))
    return rows
