"""Arithmetic with a calculator at hand: learn to call a tool, and to trust it."""

import random
from collections.abc import Sequence

from headway.core.episodes import Task
from headway.core.errors import UsageError
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
        self._expressions = _expressions(num_tasks, terms, largest, operators, split, seed)
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


def demonstrations(
    n: int,
    seed: int = 0,
    guess_share: float = 0.0,
    *,
    terms: int = 2,
    largest: int = 99,
    operators: str = "+-*",
    system: str | None = SYSTEM,
) -> list[Row]:
    """`n` conversations, none of them a task of the eval split; a share of them guesses instead of calling the tool."""
    rng = random.Random(seed)
    guessed = set(rng.sample(range(n), round(guess_share * n)))
    tools = [described.to_openai() for described in Calculator(num_tasks=1).toolbox.tools]
    rows = []
    for i, expression in enumerate(_expressions(n, terms, largest, operators, "train", seed)):
        messages = opening(system, question(expression))
        if i in guessed:
            messages.append(Message("assistant", str(rng.randint(0, largest))))
        else:
            call = ToolCall("call_0", "calculate", f'{{"expression": "{expression}"}}')
            result = str(evaluate(expression))
            messages += [
                Message("assistant", tool_calls=(call,)),
                Message("tool", result, tool_call_id=call.id),
                Message("assistant", result),
            ]
        rows.append({**demonstration(messages), "tools": tools})
    return rows


def _expressions(count: int, terms: int, largest: int, operators: str, split: Split, seed: int) -> list[str]:
    if terms < 1 or largest < 1 or not operators or set(operators) - set("+-*"):
        raise UsageError('calculator: terms and largest must be at least 1, operators some of "+-*"')
    return distinct(lambda rng: random_expression(rng, terms, largest, operators), str, count, split=split, seed=seed)
