"""The engine of a contributor, which proves what it samples."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from headway.base.errors import HeadwayError
from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import LoraSettings, ModelSettings, PlacementSettings
from headway.core.episodes import Episode
from headway.inference.engine import Engine
from headway.inference.errors import UpdateError
from headway.inference.serve import load_engine
from headway.inference.server import ServerContext, build_app
from headway.launch.contribute.options import ContributeOptions
from headway.models.registry import load_config
from headway.rendering.load import load_renderer
from headway.rendering.tokenizer import tokenizer_fingerprint
from headway.swarm.messages.api import SwarmTerms
from headway.swarm.weights.manifest import AdapterTerms
from headway.swarm.weights.versions import adapter_update_of, update_of, verify_tensors
from headway.swarm.work.prove import prove

logger = logging.getLogger(__name__)


class EngineStartError(HeadwayError):
    """The engine of a worker can't start: no order can be answered here."""


class LocalEngine:
    """An engine behind the inference protocol, on loopback, for the environment's workers. It draws tokens by the seeds
    of an order, as the run's verifier does."""

    def __init__(self, options: ContributeOptions, terms: SwarmTerms) -> None:
        self.precision = options.precision
        self._options, self._terms = options, terms
        self._service: Engine | None = None
        self._width = 0
        self._died: str | None = None
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def serve(self, folder: Path, version: int, fingerprint: str, adapter: AdapterTerms | None = None) -> None:
        """Serve a version from its folder: the trained tensors must have this fingerprint. Raises HeadwayError, and
        EngineStartError where there is no engine to serve it."""
        if self._died is not None:
            logger.warning("the engine starts again: %s", self._died)
            await self.close()
        if self._service is None:
            try:
                await asyncio.to_thread(verify_tensors, folder, fingerprint if adapter is None else adapter.base)
            except HeadwayError as error:
                raise UpdateError(f"the weights in {folder} are damaged: {error}") from None
            await self._start(folder, adapter)
        assert self._service is not None
        if adapter is None:
            await self._service.update(update_of(folder, version, fingerprint))
        else:
            await self._service.update(adapter_update_of(folder, version, fingerprint, adapter))

    async def _start(self, folder: Path, adapter: AdapterTerms | None) -> None:
        options, terms = self._options, self._terms
        lora = None if adapter is None else LoraSettings(rank=adapter.rank, alpha=adapter.alpha)
        settings = ServeSettings(
            model=ModelSettings(path=str(folder), renderer=terms.renderer, dtype=self.precision, lora=lora),
            seq_len=terms.context,
            placement=PlacementSettings(device=options.device),
            inference=inference_settings(options),
        )
        loop = asyncio.get_running_loop()

        def on_death(reason: str) -> None:
            loop.call_soon_threadsafe(self._note_death, reason)

        try:
            service = await asyncio.to_thread(load_engine, settings, folder, on_death)
            await service.start()
        except (HeadwayError, OSError) as error:
            raise EngineStartError(f"the {options.engine} engine of this worker can't start: {error}") from error
        context = ServerContext(
            load_renderer(folder, terms.renderer), loaded=service, tokenizer=tokenizer_fingerprint(folder)
        )
        self._width = load_config(folder).width
        self._runner = web.AppRunner(build_app(context), handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._service = service

    async def prove(self, episodes: Sequence[Episode]) -> list[bytes]:
        """Compute the proofs of episodes' activations, in passes of their own, after all was sampled. Raises
        HeadwayError."""
        assert self._service is not None
        return await prove(episodes, self._service.top_states, self._width)

    async def close(self) -> None:
        runner, service, self._runner, self._service, self._died = self._runner, self._service, None, None, None
        if runner is not None:
            await runner.cleanup()
        if service is not None:
            await service.close()

    def _note_death(self, reason: str) -> None:
        self._died = reason


def inference_settings(options: ContributeOptions) -> InferenceSettings:
    """Return the settings of a contributor's engine."""
    if options.engine == "embedded":
        return InferenceSettings(engine="embedded", threads=options.threads)
    from headway.inference.vllm.arguments import SEEDED_SAMPLER

    return InferenceSettings(engine="vllm", threads=options.threads, vllm={"logits_processors": [SEEDED_SAMPLER]})
