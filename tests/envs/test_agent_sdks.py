"""Agents written with other people's packages, run unchanged: what they were told is what is trained."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_engine import TOKENIZER, ScriptedEngine, serving

from headway.core.episodes import Episode, EpisodeRequest
from headway.envs.agents.agent import AgentProgram
from headway.envs.engines import Engines
from headway.envs.episodes import EpisodeRunner
from headway.envs.samples import episode_samples
from headway.rendering.chatml import ChatMLRenderer

SDKS = Path(__file__).parents[2] / "examples" / "any_agent" / "sdks"
OTHER_PYTHON = os.environ.get("HEADWAY_AGENTS_PYTHON", sys.executable)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":2,  "b": 3}}\n</tool_call>'
"""Spaced as no package would write it."""
CODE = "I add.\n<code>\nfinal_answer(add(a=2, b=3))\n</code>"


def python_for(program: str) -> str:
    """The interpreter that has the packages of `program`; skips where none has."""
    package = {"openai_agents": "agents", "langgraph_agent": "langgraph", "smolagents_code": "smolagents"}.get(program)
    if package is None:
        return sys.executable
    if subprocess.run([OTHER_PYTHON, "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(
            f"{package} is not installed: pip install 'headway[agents]' into an environment of its own, and name its "
            "interpreter in HEADWAY_AGENTS_PYTHON"
        )
    return OTHER_PYTHON


def play(program: str, answers: list[str], tmp_path: Path) -> tuple[Episode, ScriptedEngine]:
    (tmp_path / "reward.py").write_text("def reward(task, run):\n    return float(run.stdout.strip() == '5')\n")
    environment = AgentProgram(
        command=[python_for(program), str(SDKS / f"{program}.py"), "What is {a} + {b}?"],
        tasks=[{"a": 2, "b": 3}],
        reward=f"{tmp_path / 'reward.py'}:reward",
        timeout=250.0,
        env={"HOME": str(tmp_path)},
    )
    script = iter(answers)
    engine = ScriptedEngine(lambda request, prompt: next(script), context=1 << 16)

    async def main() -> Episode:
        engines = Engines()
        async with serving(engine) as url:
            request = EpisodeRequest("e", "g", environment.tasks()[0], [url], timeout=250.0, version=3)
            try:
                return await EpisodeRunner(environment, "agent", ChatMLRenderer(TOKENIZER), engines).run(request)
            finally:
                await engines.close()
                await environment.close()

    return asyncio.run(main()), engine


def assert_trained_as_sent(episode: Episode, engine: ScriptedEngine) -> None:
    """Every reply is trained once, with the engine's own logprobs, after the very prompt that it answered."""
    assert episode.error is None and episode.reward == 1.0
    asked = [(*request.token_ids, *sent.token_ids) for request, sent in zip(engine.requests, engine.sent, strict=True)]
    samples = episode_samples(episode)
    assert sum(int(sample.sampled.sum()) for sample in samples) == sum(len(sent.token_ids) for sent in engine.sent)
    for tokens in asked:
        assert any(tuple(sample.token_ids[: len(tokens)].tolist()) == tokens for sample in samples)


@pytest.mark.parametrize(
    "program", ["openai_chat", "openai_responses", "anthropic_messages", "openai_agents", "langgraph_agent"]
)
def test_an_agent_with_a_tool_makes_one_sample_of_its_own_tokens(program: str, tmp_path: Path) -> None:
    episode, engine = play(program, [CALL, "5"], tmp_path)
    assert_trained_as_sent(episode, engine)
    first, second = engine.requests
    said = [*first.token_ids, *engine.sent[0].token_ids]
    assert second.token_ids[: len(said)] == said
    assert len(episode_samples(episode)) == 1


def test_an_agent_that_writes_code_is_trained_on_what_it_wrote(tmp_path: Path) -> None:
    episode, engine = play("smolagents_code", [CODE], tmp_path)
    assert_trained_as_sent(episode, engine)
