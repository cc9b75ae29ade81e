"""Episodes without a model, for the tests of an environment."""

import asyncio
from collections.abc import Callable, Iterable

from headway.core.episodes import Task, Trace
from headway.core.messages import Message
from headway.envs.base import Environment
from headway.envs.policy import ScriptedPolicy
from headway.envs.rewards import score

Answers = str | Iterable[str | Message] | Callable[[str, list[Message]], str | Message]


def play(environment: Environment, task: Task | int, answers: Answers) -> list[Trace]:
    """Play one episode with these replies; the trace of each agent, with its rewards.

    `task` may be its number. `answers` are a text, texts or messages in order, or a function of the agent's name and
    the conversation. Raises what the environment or a reward raises.
    """
    chosen = environment.tasks()[task] if isinstance(task, int) else task
    return asyncio.run(_play(environment, chosen, [answers] if isinstance(answers, str) else answers))


async def _play(
    environment: Environment,
    task: Task,
    answers: Iterable[str | Message] | Callable[[str, list[Message]], str | Message],
) -> list[Trace]:
    policy = ScriptedPolicy(answers)
    await environment.open()
    try:
        state = await environment.run(task, policy)
        traces = [agent.trace for agent in policy.agents()] or [policy.trace]
        await score(environment.rewards(), task, traces, state)
    finally:
        await environment.close()
    return traces
