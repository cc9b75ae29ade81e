"""Rollouts made by hand: groups of replies to tasks, each with the reward that a rule gives it."""

import random
from collections.abc import Callable

from headway.core.messages import ToolCall
from headway.monitor.audit.table import RolloutTable, Row

Reply = Callable[[random.Random, str], str]
"""Draws a reply to the task of this word."""


def word(rng: random.Random, length: int = 4) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=length))


def words(rng: random.Random, least: int, most: int) -> str:
    return " ".join(word(rng) for _ in range(rng.randint(least, most)))


def made_table(
    reply: Reply,
    reward: Callable[[str, str], float],
    *,
    steps: int = 12,
    groups: int = 6,
    members: int = 8,
    prompt: Callable[[str], str] = "reverse {}".format,
    calls: Callable[[random.Random, str], tuple[ToolCall, ...]] = lambda rng, task: (),
    data: Callable[[str], tuple[str, ...]] = lambda task: (task,),
    audit: Callable[[str, str], float] | None = None,
    seed: int = 0,
) -> RolloutTable:
    """`reward` and `audit` get the reply (or the calls' arguments where it is empty) and the task's word."""
    rng, rows = random.Random(seed), []
    for step in range(1, steps + 1):
        for group in range(groups):
            task = word(rng)
            for member in range(members):
                said, called = reply(rng, task), calls(rng, task)
                judged = said or "".join(call.arguments for call in called)
                rows.append(
                    Row(
                        step=step,
                        line=group * members + member,
                        group=f"{step}-{group}",
                        task=task,
                        reward=reward(judged, task),
                        prompt=prompt(task),
                        reply=said,
                        calls=called,
                        audits={} if audit is None else {"checked": audit(judged, task)},
                        data=data(task),
                    )
                )
    return RolloutTable("made", rows)
