"""vLLM as the engine of workers in this process: it samples for orders as `headway contribute --engine vllm` does."""

import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import msgspec
from swarm_workers import MOST_NEIGHBOURS, LocalEngine, stopping

from headway.core.episodes import Episode, EpisodeRequest
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.envs.tree import Reply
from headway.inference.outputs import Result
from headway.launch.contribute.engine import LocalEngine as ContributedEngine
from headway.launch.contribute.options import ContributeOptions
from headway.models.checkpoints.tensors import hf_tensors
from headway.models.decoder import DecoderLM
from headway.swarm.messages.api import SwarmTerms
from headway.swarm.messages.orders import Precision
from headway.swarm.weights.versions import write_version

COLDEST = 0.01


class SharedVllm:
    """One vLLM, on an event loop of its own. It serves one model at a time: to start it takes most of a minute."""

    def __init__(self, base: Path, context: int, precision: Precision) -> None:
        options = ContributeOptions("", Path(), device="cpu", threads=1, dtype=precision, engine="vllm")
        terms = SwarmTerms("bench", "", "", {}, "auto", context, (precision,))
        self._engine, self._base = ContributedEngine(options, terms), base
        self._folder = tempfile.TemporaryDirectory(prefix="headway-swarm-")
        self._served: DecoderLM | None = None
        self._versions = 0
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()

    def sample(self, model: DecoderLM, requests: Sequence[GenerateRequest]) -> list[Result]:
        """Serve `model`, and sample replies to all requests together."""
        return asyncio.run_coroutine_threadsafe(self._sample(model, requests), self._loop).result()

    def prove(self, model: DecoderLM, episodes: Sequence[Episode]) -> list[bytes]:
        """Serve `model`, and compute the proofs of episodes' activations."""
        return asyncio.run_coroutine_threadsafe(self._prove(model, episodes), self._loop).result()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._engine.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._folder.cleanup()

    async def _sample(self, model: DecoderLM, requests: Sequence[GenerateRequest]) -> list[Result]:
        await self._serve(model)
        assert self._engine._service is not None
        return list(await asyncio.gather(*(self._engine._service.generate(request) for request in requests)))

    async def _prove(self, model: DecoderLM, episodes: Sequence[Episode]) -> list[bytes]:
        await self._serve(model)
        return await self._engine.prove(episodes)

    async def _serve(self, model: DecoderLM) -> None:
        if model is not self._served:
            self._versions += 1
            folder = Path(self._folder.name) / str(self._versions)
            folder.mkdir()
            fingerprint = write_version(folder, self._base, self._versions, dict(hf_tensors(model)))
            await self._engine.serve(folder, self._versions, fingerprint)
            self._served = model


class VllmSampler(LocalEngine):
    """Samples all replies to an order's prompt together with vLLM, among a random number of other requests."""

    def __init__(self, vllm: SharedVllm, model: DecoderLM, stops: Sequence[int], chance: random.Random) -> None:
        self._vllm, self._model, self._stops, self._chance = vllm, model, tuple(stops), chance

    def prove(self, episodes: Sequence[Episode]) -> list[bytes]:
        return self._vllm.prove(self._model, episodes)

    def _sample(self, tokens: list[int], requests: Sequence[EpisodeRequest]) -> dict[str, Reply]:
        asked = [GenerateRequest(tokens, sampling_params=stopping(warm(each), self._stops)) for each in requests]
        for _ in range(self._chance.randrange(MOST_NEIGHBOURS)):
            length = self._chance.randint(1, len(tokens))
            params = SamplingParams(max_tokens=self._chance.randint(1, 24))
            asked.insert(self._chance.randrange(len(asked)), GenerateRequest(tokens[:length], sampling_params=params))
        seeds = {each.sampling.seed: each for each in requests}
        replies = {}
        for request, result in zip(asked, self._vllm.sample(self._model, asked), strict=True):
            if (order := seeds.get(request.sampling_params.seed)) is not None:
                (choice,) = result.choices
                versions = [(order.version, len(choice.token_ids))]
                temperature = order.sampling.temperature
                replies[order.episode_id] = Reply(
                    choice.token_ids, choice.logprobs, versions, choice.finish_reason, temperature
                )
        return replies


def warm(request: EpisodeRequest) -> SamplingParams:
    """Return the sampling of a request, as near to greedy decoding as an engine comes that draws by seeds."""
    return msgspec.structs.replace(request.sampling, temperature=max(request.sampling.temperature, COLDEST))
