"""A contributor of a swarm: pulls orders, fetches weights, samples with an engine of its own, uploads, goes on."""

import asyncio
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from aiohttp import web

from headway.base.devices import resolve_device, resolve_dtype
from headway.base.errors import HeadwayError, UsageError
from headway.base.files import write_atomic
from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.orchestrator import EnvSettings
from headway.config.shared import LoraSettings, ModelSettings, PlacementSettings
from headway.core.episodes import Episode
from headway.envs.registry import known_environments
from headway.envs.workers.pool import EnvPool
from headway.inference.engine import Engine, UpdateError
from headway.inference.serve import load_engine
from headway.inference.server import ServerContext, build_app
from headway.models.checkpoints.folders import copy_companions
from headway.models.registry import load_config
from headway.orchestrator.run import open_session
from headway.rendering.load import load_renderer
from headway.rendering.tokenizer import tokenizer_fingerprint
from headway.swarm.messages.api import Answer, SwarmTerms
from headway.swarm.messages.keys import SigningKey
from headway.swarm.messages.orders import Contribution, Precision, WorkOrder
from headway.swarm.weights.download import Downloader, Mirrors
from headway.swarm.weights.manifest import AdapterTerms
from headway.swarm.weights.peer import CutOffError, Peer, Retry, SourceError
from headway.swarm.weights.store import ShardStore
from headway.swarm.weights.versions import adapter_update_of, update_of, verify_tensors
from headway.swarm.work.client import SwarmClient
from headway.swarm.work.prove import prove

logger = logging.getLogger(__name__)

VERSIONS_KEPT = 2
EPISODE_ATTEMPTS = 3
UPLOAD_ATTEMPTS = 6


@dataclass(frozen=True, slots=True)
class ContributeOptions:
    """A contributor's choices. `folder` holds its key and weights, `env` another id of the run's environment here."""

    url: str
    folder: Path
    run_key: bytes | None = None
    relays: Sequence[str] = ()
    env: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    engine: Literal["embedded", "vllm"] = "embedded"

    def __post_init__(self) -> None:
        if self.engine == "vllm" and self.dtype == "bfloat16":
            raise UsageError(
                "a run would refuse what vLLM samples in bfloat16: it rounds otherwise than the run's verifier; leave "
                "--dtype out, or use --engine embedded"
            )

    @property
    def precision(self) -> Precision:
        """The precision to compute in."""
        import torch

        if self.engine == "vllm":
            return "float32"
        device = resolve_device(self.device, torch.cuda.is_available())
        return "bfloat16" if resolve_dtype(self.dtype, device) == "bfloat16" else "float32"


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


class Contributor:
    """Works for one run. Killed at any time, it goes on with the order and the shards that its folder has."""

    def __init__(self, options: ContributeOptions, say: Callable[[str], None]) -> None:
        self._options, self._say = options, say
        self.key = SigningKey.open(options.folder / "worker.key")

    async def run(self) -> None:
        """Contribute until cancelled. Raises HeadwayError where the run takes nothing more from this key, or the engine
        can't start: its order stays in the folder, for the next start."""
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session())
            peer = Peer(self._options.url, session, self.key)
            self._client = SwarmClient(peer, self._options.run_key or self._known_key())
            terms = await self._agree()
            env = environment_of(terms, self._options.env)
            assert self._client.run_key is not None
            self._folder = self._options.folder / self._client.run_key.hex()[:16]
            relays = [Peer(url, session, self.key) for url in (*self._options.relays, *terms.relays)]
            store = ShardStore(self._folder / "shards", self._client.run_key)
            self._downloader = Downloader(Mirrors.of(peer, relays), store)
            self._engine = LocalEngine(self._options, terms)
            stack.push_async_callback(self._engine.close)
            self._pool: EnvPool | None = None
            stack.push_async_callback(self._close_pool)
            await self._work(terms, env)

    async def _agree(self) -> SwarmTerms:
        """Ask for the terms until the run answers."""
        retry = Retry()
        while True:
            try:
                terms = await self._client.terms()
            except SourceError as error:
                if retry.failures == 0:
                    self._say(f"waiting for the run: {error}")
                await retry.wait()
                continue
            assert self._client.run_key is not None
            write_atomic(self._known_file(), self._client.run_key.hex())
            self._say(f"run {terms.run}, key {self._client.run_key.hex()}; this worker is {self.key.public.hex()}")
            return terms

    async def _work(self, terms: SwarmTerms, env: EnvSettings) -> None:
        retry = Retry()
        idle = Retry(first=0.2, longest=2.0)
        while True:
            try:
                order = self._saved_order() or await self._client.order(terms.run)
                if order is None:
                    await idle.wait()
                    continue
                idle.succeeded()
                await self._fulfil(order, env, terms)
                retry.succeeded()
            except SourceError as error:
                if retry.failures == 0:
                    self._say(f"{error}; trying again")
                await retry.wait()

    async def _fulfil(self, order: WorkOrder, env: EnvSettings, terms: SwarmTerms) -> None:
        """Answer one order. One that can't be answered, since its version is gone or the environment fails, is given
        up. Raises SourceError where it is worth another attempt, later."""
        write_atomic(self._order_file(), msgspec.msgpack.encode(order), durable=False)
        try:
            await self._prepare(order, env, terms)
            episodes = await self._play(order)
            proofs = await self._engine.prove(episodes)
            answer = await self._upload(Contribution(order.id, self._engine.precision, episodes, proofs))
        except (SourceError, CutOffError, EngineStartError):
            raise
        except (HeadwayError, OSError) as error:
            self._order_file().unlink(missing_ok=True)
            self._say(f"order {order.id[:8]} is given up: {error}")
            await asyncio.sleep(1.0)  # for a run that gives orders which always fail
            return
        self._order_file().unlink(missing_ok=True)
        verdict = answer.verdict
        told = "accepted" if verdict.accepted else f"refused by {verdict.check}: {verdict.reason}"
        reward = sum(episode.reward for episode in episodes) / len(episodes)
        self._say(
            f"version {order.version}, mean reward {reward:.3f}: {told}; earned {answer.tokens} tokens in "
            f"{answer.accepted} contributions, {answer.refused} refused"
        )

    async def _upload(self, contribution: Contribution) -> Answer:
        """Send a contribution, several times where nobody answers: sampling it again would take longer."""
        retry = Retry()
        while True:
            try:
                return await self._client.contribute(contribution)
            except SourceError:
                if retry.failures >= UPLOAD_ATTEMPTS:
                    raise
                await retry.wait()

    async def _prepare(self, order: WorkOrder, env: EnvSettings, terms: SwarmTerms) -> None:
        """Have the order's version served, and workers that play its environment."""
        store = self._downloader.store
        manifest = await self._downloader.manifest(order.version)
        if manifest.fingerprint != order.fingerprint:
            # The run went back to a checkpoint: its version of this number is another one now.
            store.remove(order.version)
            manifest = await self._downloader.manifest(order.version)
        await self._downloader.fetch(order.version)
        folder = await asyncio.to_thread(store.assemble, order.version)
        try:
            await self._engine.serve(folder, order.version, order.fingerprint, manifest.adapter)
        except UpdateError:
            # The disk may have changed a file that all versions share: fetch everything again.
            store.keep(order.version, 0)
            raise
        store.keep(order.version, VERSIONS_KEPT)
        if self._pool is None:
            self._pool = EnvPool(env, model=self._base(folder), renderer=terms.renderer)
            await self._pool.start()

    async def _play(self, order: WorkOrder) -> list[Episode]:
        return list(await asyncio.gather(*(self._episode(order, index) for index in range(len(order.seeds)))))

    async def _episode(self, order: WorkOrder, index: int) -> Episode:
        assert self._pool is not None
        request = msgspec.structs.replace(order.request(index), engines=[self._engine.url])
        for _ in range(EPISODE_ATTEMPTS):
            episode = await self._pool.run(request)
            if episode.error is None:
                return episode
        assert episode.error is not None
        raise HeadwayError(f"an episode failed: {episode.error.message}")

    def _base(self, folder: Path) -> Path:
        """Keep config and tokenizer for as long as the environment's workers may start."""
        base = self._folder / "model"
        base.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / "config.json", base / "config.json")
        copy_companions(folder, base)
        return base

    def _saved_order(self) -> WorkOrder | None:
        """Return the order that this worker was at when it was stopped."""
        try:
            return msgspec.msgpack.decode(self._order_file().read_bytes(), type=WorkOrder)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _order_file(self) -> Path:
        return self._folder / "order.msgpack"

    def _known_file(self) -> Path:
        name = "".join(c if c.isalnum() else "_" for c in self._options.url)
        return self._options.folder / "runs" / name

    def _known_key(self) -> bytes | None:
        """Return the key by which the run at this address was known last time."""
        try:
            return bytes.fromhex(self._known_file().read_text().strip())
        except (FileNotFoundError, ValueError):
            return None

    async def _close_pool(self) -> None:
        if self._pool is not None:
            await self._pool.close()


def environment_of(terms: SwarmTerms, id: str | None) -> EnvSettings:
    """Return the environment that the run plays, as it is installed here. A run's import path is code of its choice, so
    that only names are taken from it. Raises UsageError."""
    if id is None and terms.env_id not in known_environments():
        raise UsageError(
            f'the run plays the environment "{terms.env_id}", which is not installed here; install its package, or '
            "say where it is with --env ID"
        )
    if ":" in terms.renderer:
        raise UsageError(f"the run names the renderer {terms.renderer}, which is code of its own: it is not loaded")
    return EnvSettings(id=id or terms.env_id, name=terms.env, args=terms.args)
