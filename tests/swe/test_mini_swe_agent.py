"""mini-swe-agent, unmodified, in the sandbox: it resolves an issue in more than 60 turns, and its tokens train.

Installed in an environment of its own, it is named by HEADWAY_MINI_SWE_AGENT (the folder that holds bin/mini).
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from sandbox_kinds import needs_bubblewrap
from scripted_engine import TOKENIZER, ScriptedEngine, encode, serving

from headway.core.episodes import Episode, EpisodeRequest
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.envs.engines.engines import Engines
from headway.envs.episodes import EpisodeRunner
from headway.envs.samples import episode_samples
from headway.envs.swe.swe import Swe
from headway.rendering.chatml import ChatMLRenderer

MINI = Path(os.environ.get("HEADWAY_MINI_SWE_AGENT") or sys.prefix)
TURNS = 64
VARIABLES = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

pytestmark = [
    needs_bubblewrap,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MINI / "bin" / "mini").exists(),
        reason="mini-swe-agent is not installed: the extra swe, or HEADWAY_MINI_SWE_AGENT names its environment",
    ),
]


def command(turn: int) -> str:
    """The commands of the policy: looks around, repairs the code, looks around, and hands in."""
    if turn == TURNS // 2:
        return "sed -i 's/low < high/low <= high/' smallkit/intervals.py"
    if turn == TURNS - 2:
        return (
            "python -c 'from smallkit.intervals import overlap as o; print(o((1, 3), (3, 9)))' && python -m pytest -q"
        )
    return "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if turn == TURNS - 1 else f"echo turn {turn}; ls"


def reply(turn: int) -> str:
    called = json.dumps({"name": "bash", "arguments": {"command": command(turn)}})
    return f"Step {turn}.\n<tool_call>\n{called}\n</tool_call>"


async def play() -> tuple[Episode, ScriptedEngine]:
    words = ["--task", "{issue}", "--yolo", "--exit-immediately", "--cost-limit", "0", "--model", "openai/policy"]
    environment = Swe(
        agent=[str(MINI / "bin" / "mini"), *words, "--config", "mini.yaml"],
        agent_variables=VARIABLES,
        readable=[str(MINI)],
        agent_seconds=280.0,
    )
    turn = iter(range(TURNS))

    def script(request: GenerateRequest, prompt: str) -> str:
        return reply(next(turn))

    engine = ScriptedEngine(script, context=1 << 20)
    engines = Engines()
    try:
        async with serving(engine) as url:
            runner = EpisodeRunner(environment, "swe", ChatMLRenderer(TOKENIZER), engines)
            request = EpisodeRequest(
                "e", "g", environment.tasks()[0], [url], sampling=SamplingParams(max_tokens=512), timeout=290.0
            )
            return await runner.run(request), engine
    finally:
        await engines.close()
        await environment.close()


def test_mini_swe_agent_resolves_an_issue_and_its_tokens_train() -> None:
    episode, engine = asyncio.run(play())
    assert episode.error is None, episode.error
    trace = episode.traces[0]
    assert trace.reward == 1.0 and trace.metrics["agent_calls"] == TURNS
    assert trace.metrics["tests_fixed"] == trace.metrics["tests_kept"] == 1.0
    seen = [node.message.content for node in trace.nodes if node.message is not None and node.message.role == "tool"]
    assert "(3, 3)" in seen[TURNS - 2] and "4 passed" in seen[TURNS - 2]
    samples = episode_samples(episode)
    assert len(samples) == 1, "the conversation was only ever extended"
    (sample,) = samples
    sent = [token for choice in engine.sent for token in choice.token_ids]
    assert [int(token) for token in sample.token_ids[sample.sampled]] == sent
    assert len(sent) > sum(len(encode(reply(turn))) for turn in range(TURNS)) - 1
    assert (sample.logprobs[sample.sampled] < 0).any() and set(sample.versions[sample.sampled].tolist()) == {3}
