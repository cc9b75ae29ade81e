"""What the agent's answer is worth: it should be the word of its task, backwards."""

from typing import Any

from headway.envs.agents.agent import AgentRun


def reward(task: dict[str, Any], run: AgentRun) -> dict[str, float]:
    answer, wanted = run.stdout.strip(), task["word"][::-1]
    agree = sum(a == b for a, b in zip(answer, wanted, strict=False))
    return {"exact": 0.5 * (answer == wanted), "similarity": 0.5 * agree / max(len(answer), len(wanted), 1)}
