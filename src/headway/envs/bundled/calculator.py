"""Arithmetic with a calculator at hand: learn to call a tool, and to trust it."""

import random
from collections.abc import Sequence
from typing import Any

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.core.messages import Message, ToolCall
from headway.envs.base import State, ToolUse, metric, reward, tool
from headway.envs.bundled.arithmetic import evaluate, last_number, random_expression
from headway.envs.bundled.problems import Row, Split, demonstration, distinct, opening

SYSTEM = "Use the calculator, then reply with the number only."


class Calculator(ToolUse):
    """Questions of `terms` numbers up to `largest`; the reply's last number is the answer."""

    max_turns = 4

    def __init__(
        self,
        *,
        num_tasks: int = 512,
        terms: int = 2,
        largest: int = 99,
        operators: str = "+-*",
        split: Split = "train",
        seed: int = 0,
        system: str | None = SYSTEM,
    ) -> None:
        if terms < 1 or largest < 1 or not operators or set(operators) - set("+-*"):
            raise UsageError('calculator: terms and largest must be at least 1, operators some of "+-*"')
        self._expressions = distinct(
            lambda rng: random_expression(rng, terms, largest, operators), str, num_tasks, split=split, seed=seed
        )
        self._system = system

    def tasks(self) -> Sequence[Task]:
        return [Task(text, {"expression": text, "answer": evaluate(text)}) for text in self._expressions]

    def prompt(self, task: Task) -> list[Message]:
        return opening(self._system, question(task.data["expression"]))

    @tool
    def calculate(self, expression: str) -> str:
        """Work out integer arithmetic with + - * // % and parentheses."""
        return str(evaluate(expression))

    @reward
    def correct(self, task: Task, answer: str) -> float:
        return float(last_number(answer) == task.data["answer"])

    @metric
    def tool_calls(self, state: State) -> float:
        return float(sum(len(message.tool_calls) for message in state.messages))


def question(expression: str) -> str:
    return f"{expression} = ?"


def demonstrations(n: int, seed: int = 0, guess_share: float = 0.0, **args: Any) -> list[Row]:
    """`n` conversations, none of them a task of the eval split; a share of them guesses instead of calling the tool.

    `args` are those of the environment.
    """
    environment = Calculator(num_tasks=n, seed=seed, split="train", **args)
    rng = random.Random(seed)
    guessed = set(rng.sample(range(n), round(guess_share * n)))
    tools = [described.to_openai() for described in environment.toolbox.tools]
    rows = []
    for i, task in enumerate(environment.tasks()):
        messages = environment.prompt(task)
        if i in guessed:
            messages.append(Message("assistant", str(rng.randint(0, args.get("largest", 99)))))
        else:
            call = ToolCall("call_0", "calculate", f'{{"expression": "{task.id}"}}')
            result = str(task.data["answer"])
            messages += [
                Message("assistant", tool_calls=(call,)),
                Message("tool", result, tool_call_id=call.id),
                Message("assistant", result),
            ]
        rows.append({**demonstration(messages), "tools": tools})
    return rows
