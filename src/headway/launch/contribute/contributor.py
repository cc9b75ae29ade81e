"""A contributor of a swarm: pulls orders, fetches weights, samples with an engine of its own, uploads, goes on."""

import asyncio
import logging
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from headway.base.errors import HeadwayError, UsageError
from headway.base.files import write_atomic
from headway.config.orchestrator import EnvSettings
from headway.core.episodes import Episode
from headway.envs.registry import known_environments
from headway.envs.workers.pool import EnvPool
from headway.inference.errors import UpdateError
from headway.launch.contribute.engine import EngineStartError, LocalEngine
from headway.launch.contribute.options import ContributeOptions
from headway.models.checkpoints.folders import copy_companions
from headway.orchestrator.run import open_session
from headway.swarm.messages.api import Answer, SwarmTerms
from headway.swarm.messages.keys import SigningKey
from headway.swarm.messages.orders import Contribution, WorkOrder
from headway.swarm.weights.download import Downloader, Mirrors
from headway.swarm.weights.peer import CutOffError, Peer, Retry, SourceError
from headway.swarm.weights.store import ShardStore
from headway.swarm.work.client import SwarmClient

logger = logging.getLogger(__name__)
VERSIONS_KEPT = 2
EPISODE_ATTEMPTS = 3
UPLOAD_ATTEMPTS = 6


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
