"""The environment `swe`: a repository, an issue, tools to work on it, and hidden tests that judge the result."""

import importlib.util
import shlex
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.core.messages import Message
from headway.envs.base import EpisodeFailure, State, ToolUse, metric, reward, tool
from headway.envs.bundled.problems import Split, in_split, opening
from headway.envs.policy import Policy
from headway.envs.sandboxed import Sandboxes
from headway.envs.swe.agents import AgentCommand
from headway.envs.swe.grader import Grade, grade, report
from headway.envs.swe.images import Images
from headway.envs.swe.loaders import load_tasks
from headway.envs.swe.patches import make_patch
from headway.envs.swe.runtime import Runtime, snapshot_of
from headway.envs.swe.tasks import SweTask, broken_files, hidden_files
from headway.envs.swe.workplace import Workplace
from headway.sandboxes.sandbox import WORK, Sandbox, SandboxError, Snapshot

SYSTEM = (
    "You resolve issues in a Python repository, which is the current folder. Look at the code, reproduce the problem, "
    "change the code, and call submit when the issue is resolved. Hidden tests judge your change."
)
_VIEWED = 200
_FOUND = 100

_box: ContextVar[tuple[Sandbox, Runtime]] = ContextVar("headway_swe_box")


class Swe(ToolUse):
    """Repositories with an issue to resolve, and tools to do it: bash, view, edit, search, submit.

    `tasks` is a folder that `headway swe make` wrote, or a JSON(L) file in the format of SWE-bench, SWE-smith or
    R2E-Gym, whose tasks are worked on in containers of their images; without it, three small tasks are there to try.
    `repositories` keeps tasks of those repositories only. The reward is 1 if all tests that failed now pass and all
    that passed still do. With `agent`, a command, a program does the work in place of the tools: it runs in the sandbox
    and speaks OpenAI's chat API; in its words `{issue}` stands for the issue, and `readable` are folders of this
    machine that it needs.
    """

    tool_timeout = 120.0

    def __init__(
        self,
        *,
        tasks: str | None = None,
        split: Split | None = None,
        repositories: Sequence[str] = (),
        turns: int = 40,
        system: str | None = SYSTEM,
        agent: Sequence[str] | None = None,
        agent_seconds: float = 1200.0,
        agent_variables: Mapping[str, str] | None = None,
        readable: Sequence[str] = (),
        sandbox: str = "auto",
        limits: Mapping[str, Any] | None = None,
        sandboxes: int = 16,
    ) -> None:
        self.max_turns = turns
        self._system = system
        self._folder = load_tasks(tasks)
        self._repositories = self._folder.repositories()
        found = [task for task in self._folder.tasks() if split is None or in_split(task.id, split)]
        self._tasks = {
            task.id: task for task in found if not repositories or task.repository.rpartition("-")[0] in repositories
        }
        self._sandbox, bounds = sandbox, {"memory": 1 << 30, **(limits or {})}
        self._sandboxes, self._images = Sandboxes("swe", sandbox, bounds, sandboxes), Images(bounds, sandboxes)
        self._agent = AgentCommand(agent, agent_seconds, agent_variables or {}, readable) if agent else None
        self.resumable = self._agent is None

    def check(self) -> None:
        super().check()
        if not self._tasks:
            raise UsageError("swe: no task is left; look at `tasks`, `split` and `repositories`")
        for task in self._tasks.values():
            if task.image:
                self._images.check(task, self._sandbox)
        if importlib.util.find_spec("pytest") is None and any(not one.root for one in self._repositories.values()):
            raise UsageError("swe: the small tasks need pytest: pip install pytest, or give `tasks`")

    def tasks(self) -> Sequence[Task]:
        return [Task(task.id, {"repository": task.repository, "issue": task.issue}) for task in self._tasks.values()]

    async def close(self) -> None:
        if self._agent is not None:
            await self._agent.close()
        await self._sandboxes.close()
        await self._images.close()

    def prompt(self, task: Task) -> list[Message]:
        return opening(self._system, task.data["issue"])

    async def run(self, task: Task, policy: Policy) -> State:
        given, limits = self._tasks[task.id], self._sandboxes.limits
        async with self._sandboxes.episode(policy) as meters:
            place = await self._place(given)
            state, end = await self._work(task, given, place, policy)
            with meters.phase("grade"):
                try:
                    state.grade = await grade(place, given, end, limits)
                except UsageError as error:  # a work folder that can't be read back resolves nothing
                    state.grade = Grade(0.0, 0.0, {"error": str(error)})
        policy.note("diff", state.grade.diff or "the code is as it was")
        policy.note("tests", report(given, state.grade))
        return state

    async def _place(self, given: SweTask) -> Workplace:
        if given.image:
            try:
                return await self._images.place(given)
            except (SandboxError, UsageError) as error:
                raise EpisodeFailure("environment", f"{given.image}: {error}") from error
        repository = self._repositories[given.repository]
        runtime = Runtime(self._folder.root(repository), tuple(repository.path))
        return Workplace(self._sandboxes.pool, repository, self._folder.files(repository), runtime)

    async def _work(self, task: Task, given: SweTask, place: Workplace, policy: Policy) -> tuple[State, Snapshot]:
        """Let the policy work in a sandbox; returns what it said, and the work folder as it left it."""
        broken, runtime = broken_files(place.files, given), place.runtime
        shown = {path: file for path, file in broken.items() if path not in hidden_files(given)}
        recipe = runtime.recipe if self._agent is None else self._agent.recipe(runtime.recipe)
        async with place.pool.sandbox(recipe, self._sandboxes.limits, snapshot=snapshot_of(shown), owner="swe") as box:
            if self._agent is not None:
                state = State(task=task, messages=[], turn=0, submitted=True)
                state.turn = await self._agent.run(box, given, runtime, policy)
            else:
                token = _box.set((box, runtime))
                try:
                    state = await super().run(task, policy)
                finally:
                    _box.reset(token)
            try:
                return state, await box.snapshot()
            except SandboxError as error:
                raise EpisodeFailure("environment", f"the work folder could not be read back: {error}") from error

    def start(self, state: State) -> None:
        state.submitted = False

    async def respond(self, state: State, reply: Message) -> Any:
        answer = await super().respond(state, reply)
        return None if state.submitted else answer

    @tool
    async def bash(self, command: str) -> str:
        """Run a command in a shell; each call begins in the repository. `python -m pytest` runs visible tests.

        Args:
            command: the command, such as `git grep name` or `python -c "..."`
        """
        box, runtime = _box.get()
        done = await box.run(["bash", "-c", command], env=runtime.variables(box), seconds=self.tool_timeout - 1)
        ended = f"[killed: over the limit of {done.limit}]" if done.limit and done.exit_code else ""
        ended = ended or (f"[exit code {done.exit_code}]" if done.exit_code else "")
        return "\n".join(text for text in (done.stdout.rstrip(), done.stderr.rstrip(), ended) if text)

    @tool
    async def view(self, path: str, first: int = 1, last: int = 0) -> str:
        """Show lines of a file with their numbers, or the names in a folder.

        Args:
            path: the file or folder, such as `src/module.py`
            first: the first line
            last: the last line; 0 for 200 lines from the first
        """
        box, _ = _box.get()
        last = last or first + _VIEWED - 1
        script = 'if [ -d "$1" ]; then ls -1Ap -- "$1"; else cat -n -- "$1" | sed -n "$2,$3p"; fi'
        done = await box.run(["sh", "-c", script, "sh", box.resolve(path), str(max(1, first)), str(last)])
        return done.stdout.rstrip() or done.stderr.strip() or "(nothing there)"

    @tool
    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once in a file; an empty `old` writes a new file.

        Args:
            path: the file
            old: the text to replace, with its spaces and line breaks
            new: the text in its place
        """
        box, _ = _box.get()
        if not old:
            await box.write(path, new.encode())
            return f"wrote {path}"
        try:
            before = (await box.read(path, 4 << 20)).decode()
        except SandboxError as error:
            return f"error: {error}"
        if (count := before.count(old)) != 1:
            return f"error: the old text occurs {count} times in {path}; it must occur once"
        after = before.replace(old, new)
        await box.write(path, after.encode())
        return make_patch({path: before}, {path: after}).partition("\n")[2] or "nothing changed"

    @tool
    async def search(self, text: str, path: str = ".") -> str:
        """Find lines that contain a text, as `path:line: text`.

        Args:
            text: the text to find, as it is
            path: the file or folder to look in
        """
        box, _ = _box.get()
        where = shlex.quote(box.resolve(path).removeprefix(f"{WORK}/"))
        command = f"grep -rnIF --exclude-dir=.git -e {shlex.quote(text)} -- {where} | head -n {_FOUND + 1}"
        lines = (await box.run(["sh", "-c", command])).stdout.splitlines()
        more = [f"[more than {_FOUND} lines; look for something rarer]"] if len(lines) > _FOUND else []
        return "\n".join([*(line[:300] for line in lines[:_FOUND]), *more]) or "no line contains it"

    @tool
    def submit(self, state: State) -> str:
        """End the work: the issue is resolved."""
        state.submitted = True
        return "submitted"

    @reward
    def solved(self, state: State) -> float:
        return float(state.grade.resolved)

    @metric
    def tests_fixed(self, state: State) -> float:
        return float(state.grade.fixed)

    @metric
    def tests_kept(self, state: State) -> float:
        return float(state.grade.kept)

    @metric
    def files_changed(self, state: State) -> float:
        return float(len(state.grade.changed))

    @metric
    def submitted(self, state: State) -> float:
        return float(state.submitted)
