"""Episodes against the embedded engine with the tiny model: through the pool, over HTTP, to samples."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headway.config.orchestrator import EnvSettings
from headway.core.episodes import EpisodeRequest, Task
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.envs.base import MultiTurn
from headway.envs.engines.engines import Engines
from headway.envs.episodes import EpisodeRunner
from headway.envs.samples import episode_samples
from headway.envs.workers.pool import EnvPool
from headway.models.tiny import resolve_model
from headway.rendering.load import load_renderer
from headway.transport.inference import InferenceClient


@pytest.fixture(scope="module")
def engine():
    command = [sys.executable, "-m", "headway.cli.main", "serve", "tiny", "--port", "0", "--seq-len", "512"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in server.stdout:
        if found := re.search(r"http://\S+", line):
            yield found.group(0)
            break
    server.terminate()
    assert server.wait(30) == 0


def test_logprobs_of_samples_are_those_the_engine_computes_anew(engine):
    sampling = SamplingParams(temperature=1.0, max_tokens=12, seed=1)

    async def main():
        id = f"{Path(__file__).parent / 'pool_environments.py'}:Echo"
        pool = EnvPool(EnvSettings(id=id, name="echo"), model=resolve_model("tiny"))
        await pool.start()
        requests = [EpisodeRequest(f"e{i}", "g", pool.tasks[i], [engine], sampling=sampling) for i in range(4)]
        episodes = await asyncio.gather(*(pool.run(request) for request in requests))
        await pool.close()
        checked = []
        async with InferenceClient(engine) as client:
            for episode in episodes:
                assert episode.error is None
                (sample,) = episode_samples(episode)
                asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
                reply = await client.generate(GenerateRequest(sample.token_ids.tolist(), sampling_params=asked))
                checked.append((sample, reply.prompt_logprobs))
        return checked

    for sample, again in asyncio.run(main()):
        assert sample.sampled.sum() in range(1, 13)
        assert set(sample.versions[sample.sampled]) == {0}
        for place in np.flatnonzero(sample.sampled):
            assert again[place].token_id == sample.token_ids[place]
            assert again[place].logprob == pytest.approx(sample.logprobs[place], abs=1e-4)


class Talk(MultiTurn):
    max_turns = 3

    def tasks(self):
        return [Task("0")]

    def prompt(self, task):
        return "go"

    def respond(self, state, reply):
        return "on"


def run(environment, engine):
    async def main():
        engines = Engines()
        runner = EpisodeRunner(environment, "env", load_renderer(resolve_model("tiny")), engines)
        sampling = SamplingParams(max_tokens=8, seed=3)
        episode = await runner.run(EpisodeRequest("e", "g", environment.tasks()[0], [engine], sampling=sampling))
        await engines.close()
        return episode

    return asyncio.run(main())


def test_a_conversation_stays_one_branch_or_counts_its_rewrites(engine):
    episode = run(Talk(), engine)
    assert episode.error is None
    trace = episode.traces[0]
    assert sum(node.sampled for node in trace.nodes) == 3
    assert len(trace.branches()) == 1 + trace.rewrites


def test_a_prompt_longer_than_the_context_is_told_apart(engine):
    class Long(Talk):
        def prompt(self, task):
            return "x" * 600

    assert run(Long(), engine).error.kind == "context"
