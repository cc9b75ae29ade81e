"""A task in a shell: the model works in a sandbox with a `bash` tool, and the end state is checked in a fresh one."""

import json
import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.core.messages import Message, ToolCall
from headway.envs.base import State, ToolUse, metric, reward, tool
from headway.envs.bundled.problems import Row, Split, demonstration, distinct, opening, random_word
from headway.envs.grading import fresh_fork, passes
from headway.envs.policy import Policy
from headway.envs.sandboxed import Sandboxes
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import Sandbox

SYSTEM = "You work in a shell. Use the bash tool; reply in words when the task is done."

_box: ContextVar[Sandbox] = ContextVar("headway_terminal_box")


class Terminal(ToolUse):
    """Tasks with `files` to begin with, a `prompt`, and `checks` of the end state.

    `tasks` is a list of objects; without it, `num_tasks` small ones are made up. A check is an object: `run` (a command
    for sh), `stdin`, and what to expect: `stdout` (without spaces around) or `exit_code` (0). Expectations stay outside
    the sandbox. The files of a task that `restore` names are put back before the checks.
    """

    def __init__(
        self,
        *,
        tasks: Sequence[Mapping[str, Any]] | None = None,
        num_tasks: int = 128,
        split: Split = "train",
        seed: int = 0,
        turns: int = 8,
        system: str | None = SYSTEM,
        sandbox: str = "auto",
        limits: Mapping[str, Any] | None = None,
        sandboxes: int = 32,
    ) -> None:
        self.max_turns = turns
        self._system = system
        self._sandboxes = Sandboxes("terminal", sandbox, limits, sandboxes)
        self._tasks = made_up(num_tasks, split, seed) if tasks is None else _read_tasks(tasks)

    def tasks(self) -> Sequence[Task]:
        return self._tasks

    async def close(self) -> None:
        await self._sandboxes.close()

    def prompt(self, task: Task) -> list[Message]:
        return opening(self._system, task.data["prompt"])

    async def run(self, task: Task, policy: Policy) -> State:
        recipe = Recipe(files={path: text.encode() for path, text in task.data.get("files", {}).items()})
        async with self._sandboxes.episode(policy) as meters:
            async with self._sandboxes.pool.sandbox(recipe, self._sandboxes.limits, owner="terminal") as box:
                token = _box.set(box)
                try:
                    state = await super().run(task, policy)
                finally:
                    _box.reset(token)
                end = await box.snapshot()
            restored = {path: recipe.files[path] for path in task.data.get("restore", ())}
            with meters.phase("grade"):
                async with fresh_fork(self._sandboxes.pool, end, restored, self._sandboxes.limits) as grader:
                    checks = [await passes(grader, check) for check in task.data["checks"]]
        lines = zip(task.data["checks"], checks, strict=True)
        policy.note("checks", "\n".join(f"{'ok' if good else 'FAILED'}  {check['run']}" for check, good in lines))
        state.passed = sum(checks) / len(checks)
        return state

    @tool
    async def bash(self, command: str) -> str:
        """Run a command in the shell; each call begins in the work folder.

        Args:
            command: the command, such as `ls -l`
        """
        done = await _box.get().run(["bash", "-c", command], seconds=self.tool_timeout - 1)
        ended = f"[killed: over the limit of {done.limit}]" if done.limit and done.exit_code else ""
        ended = ended or (f"[exit code {done.exit_code}]" if done.exit_code else "")
        return "\n".join(text for text in (done.stdout.rstrip(), done.stderr.rstrip(), ended) if text)

    @reward
    def solved(self, state: State) -> float:
        return float(state.passed == 1.0)

    @metric
    def checks_passed(self, state: State) -> float:
        return float(state.passed)

    @metric
    def commands(self, state: State) -> float:
        return float(sum(len(message.tool_calls) for message in state.messages))


_Made = dict[str, Any]


def made_up(count: int, split: Split, seed: int) -> list[Task]:
    """Small tasks about files; each has a `solution`, a command that solves it."""
    kinds: list[Callable[[random.Random], _Made]] = [_count_lines, _find_word, _sum_column, _rename, _extract]
    chosen = distinct(lambda rng: rng.choice(kinds)(rng), _key, count, split=split, seed=seed)
    return [Task(_key(made), made) for made in chosen]


def _key(made: _Made) -> str:
    return f"{made['prompt']} [{' '.join(sorted(made['files']))}]"


def _check(file: str, text: object) -> list[dict[str, Any]]:
    return [{"run": f"cat {shlex.quote(file)}", "stdout": str(text)}]


def _count_lines(rng: random.Random) -> _Made:
    name, lines = f"{random_word(rng, 3, 6)}.txt", rng.randint(3, 40)
    text = "".join(f"{random_word(rng, 2, 8)}\n" for _ in range(lines))
    prompt = f"Write the number of lines of {name} to answer.txt."
    solution = f"wc -l < {name} > answer.txt"
    return {"prompt": prompt, "files": {name: text}, "checks": _check("answer.txt", lines), "solution": solution}


def _find_word(rng: random.Random) -> _Made:
    names = [f"{random_word(rng, 3, 6)}{i}.log" for i in range(5)]
    word, hidden = random_word(rng, 6, 9), rng.choice(names)
    files = {
        name: f"{random_word(rng, 3, 5)}\n{word if name == hidden else random_word(rng, 3, 5)}\n" for name in names
    }
    prompt = f"Write the name of the file that contains {word} to answer.txt."
    solution = f"grep -l {word} *.log > answer.txt"
    return {"prompt": prompt, "files": files, "checks": _check("answer.txt", hidden), "solution": solution}


def _sum_column(rng: random.Random) -> _Made:
    name = f"{random_word(rng, 3, 6)}.csv"
    rows = [(random_word(rng, 3, 5), rng.randint(1, 99)) for _ in range(rng.randint(3, 9))]
    text = "".join(f"{word},{number}\n" for word, number in rows)
    prompt = f"Write the sum of the second column of {name} to answer.txt."
    solution = "awk -F, '{s += $2} END {print s}' " + f"{name} > answer.txt"
    total = sum(number for _, number in rows)
    return {"prompt": prompt, "files": {name: text}, "checks": _check("answer.txt", total), "solution": solution}


def _rename(rng: random.Random) -> _Made:
    names = sorted({random_word(rng, 3, 6) for _ in range(4)})
    old, new = rng.sample(["txt", "md", "log", "dat"], 2)
    files = {f"{name}.{old}": f"{name}\n" for name in names}
    prompt = (
        f"Rename every file that ends with .{old} so that it ends with .{new} instead. The files: {', '.join(names)}."
    )
    solution = f"for f in *.{old}; do mv $f ${{f%.{old}}}.{new}; done"
    checks = [{"run": "ls", "stdout": "\n".join(f"{name}.{new}" for name in names)}]
    checks += [{"run": f"cat {name}.{new}", "stdout": name} for name in names]
    return {"prompt": prompt, "files": files, "checks": checks, "solution": solution}


def _extract(rng: random.Random) -> _Made:
    name, wanted = f"{random_word(rng, 3, 6)}.conf", random_word(rng, 4, 6)
    keys = sorted({random_word(rng, 3, 6) for _ in range(5)} | {wanted})
    values = {key: random_word(rng, 4, 8) for key in keys}
    text = "".join(f"{key} = {value}\n" for key, value in values.items())
    prompt = f"Write the value of {wanted} in {name} to answer.txt."
    solution = f"sed -n 's/^{wanted} = //p' {name} > answer.txt"
    return {
        "prompt": prompt,
        "files": {name: text},
        "checks": _check("answer.txt", values[wanted]),
        "solution": solution,
    }


def demonstrations(n: int, seed: int = 0, **args: Any) -> list[Row]:
    """`n` conversations of training tasks in which one command does it."""
    environment = Terminal(num_tasks=n, seed=seed, **args)
    tools = [described.to_openai() for described in environment.toolbox.tools]
    rows = []
    for task in environment.tasks():
        call = ToolCall("call_0", "bash", json.dumps({"command": task.data["solution"]}))
        messages = environment.prompt(task)
        messages += [Message("assistant", tool_calls=(call,)), Message("tool", "", tool_call_id=call.id)]
        rows.append({**demonstration([*messages, Message("assistant", "done")]), "tools": tools})
    return rows


def _read_tasks(tasks: Sequence[Mapping[str, Any]]) -> list[Task]:
    rows = [dict(row) for row in tasks]
    for index, row in enumerate(rows):
        if not row.get("prompt") or not row.get("checks"):
            raise UsageError(f"terminal: task {index} needs `prompt` and `checks`")
        if missing := [path for path in row.get("restore", ()) if path not in row.get("files", {})]:
            raise UsageError(f"terminal: task {index}: {missing[0]} is to be restored but is none of its files")
    return [Task(str(row.get("id", index)), row) for index, row in enumerate(rows)]
