"""Agents written with other people's packages, run unchanged: what they were told is what is trained."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scripted_engine import IM_END, TOKENIZER, ScriptedEngine, encode, serving

from headway.algorithms.base import Context, Group, Rollout
from headway.algorithms.registry import make_algorithm
from headway.config.algorithms import Grpo
from headway.config.orchestrator import FilterSettings
from headway.config.shared import FilesystemRollouts
from headway.config.trainer import TrainSettings
from headway.core.batches import Batch
from headway.core.episodes import Episode, EpisodeRequest, Task
from headway.core.packing import Cost, make_batch
from headway.core.protocol import GenerateChoice, GenerateRequest, Logprobs, SamplingParams, TokenLogprob
from headway.core.records import TrainedLogprobs
from headway.core.runs import RunPaths
from headway.core.wire import decode
from headway.envs.agents.agent import AgentProgram
from headway.envs.engines.engines import Engines
from headway.envs.episodes import EpisodeRunner
from headway.envs.samples import episode_samples
from headway.models.tiny import resolve_model
from headway.orchestrator.collect.collector import checked_samples
from headway.orchestrator.collect.filters import judge
from headway.rendering.chatml import ChatMLRenderer
from headway.trainer.rl import train
from headway.transport.inference import InferenceClient
from headway.transport.rollouts import make_sender

SDKS = Path(__file__).parents[2] / "examples" / "any_agent" / "sdks"
OTHER_PYTHON = os.environ.get("HEADWAY_AGENTS_PYTHON", sys.executable)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a":2,  "b": 3}}\n</tool_call>'
"""Spaced as no package would write it."""
WITH_TOOL = ["openai_chat", "openai_responses", "anthropic_messages", "openai_agents", "langgraph_agent"]
SEQ_LEN = 16384
CODE = "I add.\n<code>\nfinal_answer(add(a=2, b=3))\n</code>"


def python_for(program: str) -> str:
    """The interpreter that has the packages of `program`; skips where none has."""
    package = {"openai_agents": "agents", "langgraph_agent": "langgraph", "smolagents_code": "smolagents"}.get(program)
    if package is None:
        return sys.executable
    if subprocess.run([OTHER_PYTHON, "-c", f"import {package}"], capture_output=True).returncode:
        pytest.skip(
            f"{package} is not installed: pip install -e '.[agents]' into an environment of its own, and name its "
            "interpreter in HEADWAY_AGENTS_PYTHON"
        )
    return OTHER_PYTHON


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a longer context: one package's system prompt alone has 8,500 tokens here."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(resolve_model("tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": SEQ_LEN}))
    return folder


@pytest.fixture(scope="module")
def scorer(model: Path) -> Iterator[str]:
    """The URL of an engine that computes the logprobs of what the script says."""
    command = [sys.executable, "-m", "headway.cli.main", "serve", str(model), "--port", "0"]
    command += ["--seq-len", str(SEQ_LEN), "--inference.threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = next((line for line in server.stdout if line.startswith("serving")), None)
        assert line is not None, "headway serve ended before it served"
        yield line.split(" at ")[1].split()[0]
    finally:
        server.terminate()
        server.wait(30)


Played = tuple[Episode, ScriptedEngine]


@pytest.fixture(scope="module")
def play(scorer: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, tuple[str, ...]], Played]:
    """Runs a program whose model says `answers`, once for all tests."""

    @cache
    def run(program: str, answers: tuple[str, ...]) -> Played:
        return asyncio.run(run_agent(program, answers, tmp_path_factory.mktemp(program), scorer))

    return run


async def run_agent(program: str, answers: Sequence[str], folder: Path, scorer: str) -> Played:
    (folder / "reward.py").write_text("def reward(task, run):\n    return float(run.stdout.strip() == '5')\n")
    environment = AgentProgram(
        command=[python_for(program), str(SDKS / f"{program}.py"), "What is {a} + {b}?"],
        tasks=[{"a": 2, "b": 3}],
        reward=f"{folder / 'reward.py'}:reward",
        timeout=250.0,
        env={"HOME": str(folder)},
    )
    script = iter(answers)

    async def say(request: GenerateRequest, prompt: str) -> GenerateChoice:
        ids = [*encode(next(script)), IM_END]
        scored = GenerateRequest(
            [*request.token_ids, *ids], sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0)
        )
        reply = await client.generate(scored)
        scores = zip(ids, reply.prompt_logprobs[-len(ids) :], strict=True)
        logprobs = [TokenLogprob(f"token_id:{token}", token, score.logprob) for token, score in scores]
        return GenerateChoice(0, ids, "stop", Logprobs(logprobs), [(0, len(ids))])

    engine, engines = ScriptedEngine(say, context=SEQ_LEN), Engines()
    async with serving(engine) as url, InferenceClient(scorer) as client:
        request = EpisodeRequest(f"{program}.{len(answers[-1])}", "g", environment.tasks()[0], [url], timeout=250.0)
        try:
            return await EpisodeRunner(environment, "agent", ChatMLRenderer(TOKENIZER), engines).run(request), engine
        finally:
            await engines.close()
            await environment.close()


def assert_trained_as_sent(episode: Episode, engine: ScriptedEngine) -> None:
    """Every reply is trained once, with the engine's own logprobs, after the very prompt that it answered."""
    assert episode.error is None and episode.reward == 1.0
    asked = [(*request.token_ids, *sent.token_ids) for request, sent in zip(engine.requests, engine.sent, strict=True)]
    samples = episode_samples(episode)
    assert sum(int(sample.sampled.sum()) for sample in samples) == sum(len(sent.token_ids) for sent in engine.sent)
    for tokens in asked:
        assert any(tuple(sample.token_ids[: len(tokens)].tolist()) == tokens for sample in samples)


@pytest.mark.parametrize("program", WITH_TOOL)
def test_an_agent_with_a_tool_makes_one_sample_of_its_own_tokens(program: str, play) -> None:
    episode, engine = play(program, (CALL, "5"))
    assert_trained_as_sent(episode, engine)
    first, second = engine.requests
    said = [*first.token_ids, *engine.sent[0].token_ids]
    assert second.token_ids[: len(said)] == said
    assert len(episode_samples(episode)) == 1


def test_an_agent_that_writes_code_is_trained_on_what_it_wrote(play) -> None:
    episode, engine = play("smolagents_code", (CODE,))
    assert_trained_as_sent(episode, engine)


def all_played(play) -> list[Played]:
    """An episode of every package that is installed, and one that failed, to compare them with."""
    played = [play("openai_chat", (CALL, "six"))]
    for program, answers in [*((program, (CALL, "5")) for program in WITH_TOOL), ("smolagents_code", (CODE,))]:
        with contextlib.suppress(pytest.skip.Exception):
            played.append(play(program, answers))
    return played


@pytest.mark.timeout(600)
def test_a_step_trains_exactly_the_tokens_that_the_agents_were_sent(play, model: Path, tmp_path: Path) -> None:
    played = all_played(play)
    group = Group("g", "agent", Task("0"), [Rollout(episode, checked_samples(episode)) for episode, _ in played])
    make_algorithm(Grpo(), Context()).score(group)
    verdict = judge(group, FilterSettings(), SEQ_LEN)
    assert verdict.cause is None and not verdict.dropped
    batch = make_batch(1, verdict.samples, seq_len=SEQ_LEN, ranks=1, cost=Cost())
    sent = {episode.id: [list(choice.token_ids) for choice in engine.sent] for episode, engine in played}
    assert trained_tokens(batch) == {
        id: [token for reply in replies for token in reply] for id, replies in sent.items()
    }

    paths = RunPaths(tmp_path / "run")
    for part in (paths.metrics, paths.control, paths.batches):
        part.mkdir(parents=True)
    make_sender(FilesystemRollouts(), paths).send(batch, b"{}")
    settings = {
        "max_steps": 1,
        "seq_len": SEQ_LEN,
        "model": {"path": str(model)},
        "placement": {"device": "cpu"},
        "weights": {"type": "filesystem"},
        "trainer": {"optim": {"type": "adamw", "lr": 1e-3}, "record_logprobs": 1 << 16},
    }
    assert train(TrainSettings.model_validate(settings), paths)

    kept = decode(TrainedLogprobs, paths.trained_logprobs(1, 0).read_bytes())
    engines = {episode.id: engine for episode, engine in played}
    assert {sample.key.episode for sample in kept.samples} == set(sent)
    for sample in kept.samples:
        said = [entry.logprob for choice in engines[sample.key.episode].sent for entry in choice.logprobs.content]
        np.testing.assert_allclose(sample.logprobs, said, atol=1e-4)


def trained_tokens(batch: Batch) -> dict[str, list[int]]:
    """The tokens of each episode that the loss covers, as the trainer is sent them."""
    found = {}
    for micro in batch.ranks[0]:
        starts = np.cumsum([0, *micro.lengths[:-1]])
        for key, start, length in zip(micro.keys, starts, micro.lengths, strict=True):
            here = slice(start, start + length)
            assert np.array_equal(micro.rl_weight[here] != 0, micro.sampled[here])
            assert (micro.advantages[here][micro.sampled[here]] != 0).all()
            found[key.episode] = micro.token_ids[here][micro.sampled[here]].tolist()
    return found
