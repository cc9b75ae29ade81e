"""An environment for killing: a reply, and a command with it in a sandbox that leaves a process behind."""

from collections.abc import Sequence

from headway.core.episodes import Task
from headway.core.messages import Message
from headway.envs.base import Environment, reward
from headway.envs.policy import Policy
from headway.envs.sandboxed import Sandboxes

SLEEP = "86411"
"""Seconds that no other program sleeps: what is left behind is found by them."""


class Boxed(Environment):
    """The reward is a digest of the reply, so that the episodes of a group differ whatever a model says."""

    def __init__(self, *, sandbox: str = "auto") -> None:
        self._sandboxes = Sandboxes("boxed", sandbox, most=8)

    def tasks(self) -> Sequence[Task]:
        return [Task(str(number), {}) for number in range(64)]

    async def run(self, task: Task, policy: Policy) -> str:
        reply = await policy.chat([Message("user", task.id)])
        async with self._sandboxes.episode(policy), self._sandboxes.pool.sandbox() as box:
            await box.background(["sh", "-c", f"setsid sleep {SLEEP} & sleep {SLEEP}"], log="log")
            done = await box.run(["cksum"], stdin=reply.content.encode(errors="replace"))
            return done.stdout

    @reward
    def digest(self, state: str) -> float:
        return int(state.split()[0]) % 10 / 10

    async def close(self) -> None:
        await self._sandboxes.close()
