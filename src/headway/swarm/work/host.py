"""The swarm of a run: its key, ledger and weights in the run's folder, and the service that strangers reach."""

import asyncio
import logging
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from headway.base.errors import HeadwayError, UsageError
from headway.config.orchestrator import EnvSettings, OrchestrateSettings
from headway.core.episodes import Episode, Task
from headway.core.protocol import SamplingParams, WeightUpdate
from headway.core.runs import RunPaths
from headway.envs.base import Environment
from headway.envs.registry import load_environment
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.rendering.load import load_renderer
from headway.swarm.messages.api import SwarmTerms
from headway.swarm.messages.keys import SigningKey
from headway.swarm.messages.orders import Contribution, RunTerms
from headway.swarm.trust.checks.form import Form
from headway.swarm.trust.checks.termination import Termination
from headway.swarm.trust.ledger import Ledger
from headway.swarm.trust.play import PoolPlayer
from headway.swarm.trust.verifier import Verifier
from headway.swarm.weights.manifest import HashedFolder
from headway.swarm.weights.store import ShardStore, publish_folder
from headway.swarm.weights.versions import VersionFolders
from headway.swarm.work.demand import Demand
from headway.swarm.work.desk import Desk
from headway.swarm.work.service import SwarmService
from headway.swarm.work.spool import Spool, VerifiedGroup
from headway.swarm.work.traffic import TrafficFile
from headway.transport.control.folder import FolderControl

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""Pause between two looks for a new version of the trainer."""
MOST_VERSIONS = 4
"""Versions that are kept for strangers, however large the lag that a run allows."""


class SwarmHost:
    """The trusted side of a run's swarm. It may be killed at any time: what it must know is in the run's folder."""

    def __init__(
        self,
        settings: OrchestrateSettings,
        paths: RunPaths,
        relays: Sequence[str] = (),
        bytes_per_second: float | None = None,
    ) -> None:
        self._settings, self._control = settings, FolderControl(paths)
        env = check_swarm(settings)
        self.key = SigningKey.open(paths.swarm / "run.key")
        self._spool, self._store = Spool(paths), ShardStore(paths.swarm / "shards", self.key.public)
        base = resolve_model(settings.model.path, settings.model.family)
        self._versions = VersionFolders(paths.swarm / "versions", base, settings.model.lora)
        self._env = env.name or env.id
        environment = load_environment(env.id, env.args)
        tasks = tasks_of(environment)
        context = min(settings.seq_len, load_config(base).max_len)
        terms = _run_terms(settings, env, paths.root.name, tasks, self.key, context)
        ledger = Ledger(paths.swarm / "ledger.jsonl", self.key)
        self.run = terms.run
        self._player = PoolPlayer(env, base, settings.model.renderer, repeats=environment.resumable)
        self.desk = Desk(terms, self.key, ledger, self._verifier(base))
        self._publish_kept()
        self._numbers = {task.id: index for index, task in enumerate(tasks)}
        self._traffic = TrafficFile(paths.swarm / "traffic.json")
        self._demand = Demand(_most_groups(settings, env))
        self._published: WeightUpdate | None = None
        shown = SwarmTerms(
            terms.run,
            self._env,
            env.id,
            env.args,
            settings.model.renderer,
            context,
            ("float32", "bfloat16"),
            tuple(relays),
        )
        self.service = SwarmService(
            self.desk,
            self.key,
            shown,
            self._store,
            wanted=self.wanted,
            accept=self._accept,
            bytes_per_second=bytes_per_second,
        )

    def _publish_kept(self) -> None:
        """Take up the versions that were published before this process was started again."""
        for version in self._store.versions():
            if (manifest := self._store.manifest(version)) is not None and self._versions.path(version).is_dir():
                self.desk.publish(version, manifest.fingerprint)

    def _verifier(self, base: Path) -> Verifier:
        renderer = load_renderer(base, self._settings.model.renderer, self._settings.model.family)
        config = load_config(base)
        light = (Form(config.vocab_size, config.width), Termination({*renderer.stop_token_ids, *config.eos_ids}))
        return Verifier(light, self._player, self._versions.model)

    def wanted(self) -> bool:
        """Tell if more orders should be given: fewer groups wait or are expected than the next batches can use."""
        return self._demand.wanted(self.desk.trust, len(self._spool.waiting()))

    def _accept(self, worker: str, contribution: Contribution, episodes: list[Episode], dropped: Sequence[str]) -> None:
        self._spool.drop(list(dropped))
        if episodes:
            first = episodes[0]
            number = self._numbers[first.task.id]
            self._spool.put(VerifiedGroup(contribution.order, self._env, number, first.version, worker, episodes))

    async def watch(self) -> None:
        """Publish the versions that the trainer announces, until the run has finished or is asked to stop. Workers play
        episodes again meanwhile."""
        try:
            await self._player.start()
            await self._watch()
        finally:
            await self._player.close()

    async def _watch(self) -> None:
        while not (self._control.finished() or self._control.stop_asked()):
            update = self._control.latest()
            if update is not None and update != self._published:
                try:
                    await asyncio.to_thread(self._fetch, update)
                except HeadwayError as error:
                    # The trainer may have withdrawn it meanwhile: a newer one is there then.
                    logger.warning("version %d is not published: %s", update.version, error)
                else:
                    self._publish(update)
            self._traffic.write(self.service.bandwidth.sent, self.service.uploaded)
            await asyncio.sleep(LOOK_SECONDS)

    def _fetch(self, update: WeightUpdate) -> None:
        folder = self._versions.fetch(update)
        publish_folder(
            self._store,
            self.key,
            self.run,
            update.version,
            update.fingerprint,
            folder,
            adapter=self._versions.adapter_terms(),
            before=self._hashed_before(update.version),
        )

    def _hashed_before(self, version: int) -> HashedFolder | None:
        """Find the newest other version whose folder is here: an adapter's base need not be hashed again."""
        for other in reversed(self._store.versions()):
            manifest = self._store.manifest(other)
            if other != version and manifest is not None and self._versions.path(other).is_dir():
                return HashedFolder(self._versions.path(other), manifest)
        return None

    def _publish(self, update: WeightUpdate) -> None:
        kept = min(self._settings.orchestrator.max_lag + 1, MOST_VERSIONS)
        oldest = update.version - kept + 1
        self.desk.publish(update.version, update.fingerprint)
        if oldest > 0:
            self.desk.retire(oldest - 1)
        self._versions.remove_before(oldest)
        self._store.keep(update.version, kept)
        self._published = update
        logger.info("version %d is published", update.version)


def check_swarm(settings: OrchestrateSettings) -> EnvSettings:
    """Return the environment of a swarm. Raises UsageError where the run can't have one."""
    options = settings.orchestrator
    if not options.swarm:
        raise UsageError("the run takes no groups of a swarm: start it with --orchestrator.swarm true")
    if len(options.envs) != 1:
        raise UsageError("a swarm plays one training environment; this run has another number of them")
    (env,) = options.envs
    if env.context is not None:
        raise UsageError("a swarm plays environments by their own rule for long conversations: leave `context` out")
    if env.task_set is not None:
        raise UsageError("a swarm draws from all tasks of its environment: leave `task_set` out")
    if settings.model.family is not None or ":" in settings.model.renderer:
        raise UsageError("strangers have no code of yours: a swarm needs a model and a renderer that Headway brings")
    return env


def tasks_of(environment: Environment) -> list[Task]:
    environment.check()
    return list(environment.tasks())


def _most_groups(settings: OrchestrateSettings, env: EnvSettings) -> float:
    """Return the groups that the next batches can use."""
    options = settings.orchestrator
    batches = 1 + min(options.run_ahead, options.max_lag)
    return batches * options.batch_size / (env.group_size or options.group_size)


def _run_terms(
    settings: OrchestrateSettings, env: EnvSettings, run: str, tasks: list[Task], key: SigningKey, context: int
) -> RunTerms:
    options = settings.orchestrator
    sampling = SamplingParams(**(env.sampling or options.sampling).model_dump())
    # The secret follows from the run's key, which it does not give away when it is published.
    secret = sha256(key.sign_bytes("OrderSecret", run.encode())).digest()
    size = env.group_size or options.group_size
    return RunTerms(run, secret, env.name or env.id, tasks, size, sampling, context)
