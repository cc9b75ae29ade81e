"""Write or repair code: a program is run on hidden tests in a sandbox, and what it answers is judged outside.

Expected answers never enter the sandbox, so that no code in it can find, change or fake them.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.core.messages import Message
from headway.envs.base import MultiTurn, State, metric, reward
from headway.envs.bundled.languages import LANGUAGES, run_cases
from headway.envs.bundled.problems import Row, Split, demonstration, distinct, opening
from headway.envs.policy import Policy
from headway.envs.sandboxed import Sandboxes

_FENCED = re.compile(r"```[\w+-]*\n(.*?)```", re.DOTALL)
_OPERATORS = "+-*"
_INPUTS = range(2, 10)


class Code(MultiTurn):
    """Shows a task and the first of its tests; failed tests are told, and the model may try again.

    `tasks` is a JSONL file or a list of objects: `prompt`, `language` (python), `entry` (the function to call; without
    one, a program that reads stdin), `template` (text with {code}), `tests` (pairs of arguments or stdin, and the
    answer) and `shown` (how many of them are told: 1). Without `tasks`, `num_tasks` one-line functions with a wrong
    operator are to be repaired.
    """

    def __init__(
        self,
        *,
        tasks: str | Sequence[Mapping[str, Any]] | None = None,
        num_tasks: int = 256,
        split: Split = "train",
        seed: int = 0,
        turns: int = 3,
        system: str | None = None,
        sandbox: str = "auto",
        limits: Mapping[str, Any] | None = None,
        sandboxes: int = 32,
        warm: int = 0,
    ) -> None:
        self.max_turns = turns
        self._system = system
        self._tasks = repairs(num_tasks, split, seed) if tasks is None else _read_tasks(tasks)
        self._sandboxes = Sandboxes("code", sandbox, {"seconds": 10.0, **(limits or {})}, sandboxes, warm)

    def tasks(self) -> Sequence[Task]:
        return self._tasks

    async def close(self) -> None:
        await self._sandboxes.close()

    def prompt(self, task: Task) -> list[Message]:
        return opening(self._system, task.data["prompt"])

    async def run(self, task: Task, policy: Policy) -> State:
        async with self._sandboxes.episode(policy):
            state = await super().run(task, policy)
        for number, report in enumerate(state.reports, 1):
            policy.note(f"tests {number}", report)
        return state

    def start(self, state: State) -> None:
        state.passed = 0.0
        state.reports = []

    async def respond(self, state: State, reply: Message) -> str | None:
        tests = state.task.data["tests"]
        answers = await self._answers(state.task, extract(reply.content))
        right = [same(answer, test[1]) for answer, test in zip(answers, tests, strict=True)]
        state.passed = sum(right) / len(tests)
        state.reports.append(_report(state.task, answers, right))
        if all(right):
            return None
        return _feedback(state.task, answers, right)

    async def _answers(self, task: Task, code: str) -> list[Any]:
        """Run the code on all tests in a sandbox that nobody used before; what it does not answer is missing."""
        data = task.data
        code = data.get("template", "{code}").replace("{code}", code)
        inputs = [test[0] for test in data["tests"]]
        async with self._sandboxes.pool.sandbox(limits=self._sandboxes.limits, owner="code") as box:
            return await run_cases(box, data.get("language", "python"), code, data.get("entry"), inputs)

    @reward
    def solved(self, state: State) -> float:
        return float(state.passed == 1.0)

    @metric
    def tests_passed(self, state: State) -> float:
        return float(state.passed)

    @metric
    def attempts(self, state: State) -> float:
        return float(state.turn)


def same(answer: Any, expected: Any) -> bool:
    """Compare as JSON does, except that 1 and true differ."""
    return type(answer) is type(expected) and bool(answer == expected)


def extract(text: str) -> str:
    """The last fenced block of a reply, or all of it."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text.strip()


def _report(task: Task, answers: list[Any], right: list[bool]) -> str:
    """Tell the outcome of every test, hidden ones too, for those who read the episode."""
    lines = zip(task.data["tests"], answers, right, strict=True)
    return "\n".join(f"{'ok' if good else 'FAILED'}  {test[0]!r} -> {answer!r}" for test, answer, good in lines)


def _feedback(task: Task, answers: list[Any], right: list[bool]) -> str:
    """Tell the first shown test that failed; of hidden ones only that some did."""
    entry = task.data.get("entry")
    for test, answer, good in list(zip(task.data["tests"], answers, right, strict=True))[: task.data.get("shown", 1)]:
        if not good:
            call = f"{entry}({', '.join(json.dumps(value) for value in test[0])})" if entry else f"input {test[0]!r}"
            return f"{call} = {json.dumps(answer) if answer is not None else 'no answer'}"
    return "a hidden test failed"


def repairs(count: int, split: Split, seed: int) -> list[Task]:
    """One-line functions with a wrong operator: `f(4) = 12` and `return x + 3` want `return x * 3`."""

    def make(rng: random.Random) -> tuple[str, str, int]:
        right, wrong = rng.sample(_OPERATORS, 2)
        return wrong, right, rng.randint(2, 9)

    def key(found: tuple[str, str, int]) -> str:
        return f"return x {found[0]} {found[2]} -> {found[1]}"

    # 48 functions: more tasks are the same functions with other inputs, and the name of the split in the key.
    def with_input(rng: random.Random) -> tuple[tuple[str, str, int], list[int]]:
        return make(rng), rng.sample(_INPUTS, 4)

    chosen = distinct(with_input, lambda one: f"{key(one[0])} {one[1]}", count, split=split, seed=seed)
    return [_repair(f"{key(one)} {inputs}", *one, inputs) for one, inputs in chosen]


def _repair(name: str, wrong: str, right: str, constant: int, inputs: list[int]) -> Task:
    tests = [[[x], _calculate(x, right, constant)] for x in inputs]
    prompt = f"f({inputs[0]}) = {tests[0][1]}\nreturn x {wrong} {constant}"
    data = {"prompt": prompt, "entry": "f", "template": "def f(x):\n    {code}\n", "tests": tests, "shown": 1}
    return Task(name, {**data, "solution": f"return x {right} {constant}"})


def _calculate(x: int, operator: str, y: int) -> int:
    return x + y if operator == "+" else x - y if operator == "-" else x * y


def demonstrations(n: int, seed: int = 0, stubborn_share: float = 0.0, turns: int = 3, **args: Any) -> list[Row]:
    """`n` conversations of training tasks. Each turn tries another operator, or stubbornly what was tried before."""
    rng = random.Random(seed)
    rows = []
    for task in repairs(n, "train", seed):
        messages = opening(args.get("system"), task.data["prompt"])
        wrong = re.search(r"return x (.) (\d)", task.data["prompt"])
        assert wrong is not None
        x, expected = task.data["tests"][0][0][0], task.data["tests"][0][1]
        tried = [wrong[1]]
        for _ in range(turns):
            untried = [one for one in _OPERATORS if one not in tried]
            operator = tried[-1] if rng.random() < stubborn_share else rng.choice(untried)
            tried.append(operator)
            messages.append(Message("assistant", f"return x {operator} {wrong[2]}"))
            answer = _calculate(x, operator, int(wrong[2]))
            if f"return x {operator} {wrong[2]}" == task.data["solution"] or len(messages) >= 2 * turns:
                break
            messages.append(Message("user", f"f({x}) = {answer}" if answer != expected else "a hidden test failed"))
        rows.append(demonstration(messages))
    return rows


def _read_tasks(tasks: str | Sequence[Mapping[str, Any]]) -> list[Task]:
    if isinstance(tasks, str):
        try:
            lines = Path(tasks).read_bytes().splitlines()
            rows = [msgspec.json.decode(line, type=dict[str, Any]) for line in lines if line.strip()]
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(f"code: tasks {tasks}: {error}; it must be a JSONL file of objects") from error
    else:
        rows = [dict(row) for row in tasks]
    for index, row in enumerate(rows):
        if not row.get("prompt") or not row.get("tests"):
            raise UsageError(f"code: task {index} needs `prompt` and `tests`")
        language = row.get("language", "python")
        if language not in LANGUAGES:
            raise UsageError(f"code: task {index}: unknown language {language!r}; known are {', '.join(LANGUAGES)}")
        if row.get("entry") and language != "python":
            raise UsageError(f"code: task {index}: `entry` needs python; programs in {language} read stdin")
    return [Task(str(row.get("id", index)), row) for index, row in enumerate(rows)]
