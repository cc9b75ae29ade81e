"""Making of a folder of tasks: packages in parallel, bounded, with a record from which it can be resumed."""

import asyncio
import logging
import sys
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec

from headway.base.errors import UsageError
from headway.base.files import write_atomic
from headway.envs.swe.make.mutations import KINDS, SEVERAL
from headway.envs.swe.make.packages import Package
from headway.envs.swe.make.planting import TWIN, Candidate, Planter, Verdict, candidates
from headway.envs.swe.make.report import PackageReport, write_report
from headway.envs.swe.make.survey import PackageRejectedError, survey
from headway.envs.swe.tasks import FORMAT, Repository, SweTask, TaskFolder
from headway.sandboxes.kinds import backend_class
from headway.sandboxes.pool import SandboxPool
from headway.sandboxes.sandbox import Limits

logger = logging.getLogger(__name__)

PACKAGES_AT_ONCE = 2
TRIES_PER_TASK = 4
LIMITS = Limits(memory=1 << 30, processes=128, disk=256 << 20, seconds=300.0)


@dataclass(frozen=True)
class MakeSettings:
    """Settings of one making. The same seed, packages and interpreter make the same tasks."""

    packages: Sequence[Package]
    folder: Path
    per_package: int = 20
    seed: int = 0
    kinds: tuple[str, ...] = (*KINDS, SEVERAL)
    jobs: int = 2
    sandbox: str = "auto"
    minutes: float | None = None
    """Begin nothing new after this time. What was made until then depends on the machine's speed."""


class _Record(msgspec.Struct, omit_defaults=True):
    """The state of one package on disk: what was tried, and the result once it is finished."""

    settings: list[object]
    report: PackageReport | None = None
    repository: Repository | None = None
    tasks: list[SweTask] = []
    verdicts: list[Verdict] = []


@dataclass
class Maker:
    """Makes tasks. `on_progress` is told a line at each step of note."""

    settings: MakeSettings
    on_progress: Callable[[str], None] = lambda line: None
    _building: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def make(self) -> list[PackageReport]:
        """Make the folder; returns a report for each package. What an earlier call finished is not done again."""
        settings = self.settings
        if not backend_class(settings.sandbox).isolates:
            raise UsageError(f"--sandbox {settings.sandbox} isolates nothing, and packages are code of others")
        pool = SandboxPool(settings.sandbox, most=settings.jobs)
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + 60 * settings.minutes if settings.minutes is not None else float("inf")
        places = asyncio.Semaphore(PACKAGES_AT_ONCE)

        async def one(package: Package) -> _Record:
            async with places:
                return await self._package(pool, package, deadline)

        try:
            records = await asyncio.gather(*(one(package) for package in settings.packages))
        finally:
            await pool.close()
        repositories = [record.repository for record in records if record.repository is not None]
        TaskFolder(settings.folder).write(repositories, [task for record in records for task in record.tasks])
        reports = [record.report for record in records if record.report is not None]
        write_report(settings.folder, reports, loop.time() - began)
        return reports

    async def _package(self, pool: SandboxPool, package: Package, deadline: float) -> _Record:
        record = self._open(package)
        if record.report is not None and not record.report.unfinished and not record.report.rejected_package:
            self.on_progress(f"{package.name}: {record.report.tasks} tasks, from an earlier call")
            return record
        clock = asyncio.get_running_loop().time
        began = clock()
        if began >= deadline:
            record.report = _unfinished(package, record)
            return record
        folder = TaskFolder(self.settings.folder)
        try:
            found = await survey(pool, package, folder, self.settings.folder / "archives", LIMITS, self._building)
        except PackageRejectedError as error:
            record.report = PackageReport(package.name, rejected_package=str(error), seconds=clock() - began)
            self.on_progress(f"{package.name}: rejected: {error}")
            return record
        self.on_progress(
            f"{package.name}: {len(found.repository.passing)} tests pass in {found.repository.seconds:.1f} s"
        )
        record.repository, record.tasks = found.repository, []
        chosen = candidates(found, self.settings.seed, self.settings.kinds)
        planter = Planter(pool, found, LIMITS, self.settings.seed)
        reasons = await self._choose_tasks(planter, chosen, package, record, deadline)
        record.report = PackageReport(
            package.name,
            version=found.version,
            tests=len(found.repository.passing),
            test_seconds=found.repository.seconds,
            sites=len(chosen),
            tried=len(record.tasks) + reasons.total(),
            tasks=len(record.tasks),
            kinds=dict(Counter(task.id.split(".")[-2] for task in record.tasks)),
            rejected=dict(reasons),
            seconds=clock() - began,
            unfinished=clock() >= deadline and len(record.tasks) < self.settings.per_package,
        )
        self._save(package, record)
        return record

    async def _choose_tasks(
        self, planter: Planter, chosen: list[Candidate], package: Package, record: _Record, deadline: float
    ) -> Counter[str]:
        """Try candidates until the record has enough tasks, and count why the others were rejected.

        Verdicts are saved as they come: a call that continues an interrupted one takes them from the record.
        """
        limited = list(islice(chosen, TRIES_PER_TASK * self.settings.per_package))
        known = {verdict.key: verdict for verdict in record.verdicts}
        reasons: Counter[str] = Counter()
        patches: set[str] = set()
        async with aclosing(self._verdicts(planter, limited, known, deadline)) as verdicts:
            async for verdict in verdicts:
                if verdict.key not in known:
                    record.verdicts.append(verdict)
                    self._save(package, record)
                if verdict.task is None:
                    reasons[verdict.reason] += 1
                elif verdict.task.patch in patches:
                    reasons[TWIN] += 1
                else:
                    patches.add(verdict.task.patch)
                    record.tasks.append(verdict.task)
                    self.on_progress(f"{package.name}: {len(record.tasks)} of {self.settings.per_package} tasks")
                if len(record.tasks) >= self.settings.per_package:
                    break
        return reasons

    async def _verdicts(
        self, planter: Planter, chosen: list[Candidate], known: dict[str, Verdict], deadline: float
    ) -> AsyncGenerator[Verdict, None]:
        """Verdicts in the order of the candidates, some of which are tried at once."""
        loop = asyncio.get_running_loop()
        waiting = deque(chosen)
        running: deque[asyncio.Task[Verdict]] = deque()

        async def verdict(candidate: Candidate) -> Verdict:
            return known.get(candidate.key) or await planter.try_candidate(candidate)

        try:
            while running or waiting:
                while waiting and len(running) < self.settings.jobs and loop.time() < deadline:
                    running.append(loop.create_task(verdict(waiting.popleft())))
                if not running:
                    return
                yield await running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _path(self, package: Package) -> Path:
        return self.settings.folder / "progress" / f"{package.name}.json"

    def _open(self, package: Package) -> _Record:
        """The record of an earlier call with the same settings, or a new one."""
        settings = self.settings
        source = str(package.source) if package.source else ""
        wanted: list[object] = [FORMAT, package.name, package.version, source, list(package.needs), settings.seed]
        wanted += [settings.per_package, list(settings.kinds), list(sys.version_info[:2])]
        try:
            record = msgspec.json.decode(self._path(package).read_bytes(), type=_Record)
        except (OSError, msgspec.DecodeError):
            return _Record(wanted)
        return record if record.settings == wanted else _Record(wanted)

    def _save(self, package: Package, record: _Record) -> None:
        write_atomic(self._path(package), msgspec.json.encode(record), durable=False)


def _unfinished(package: Package, record: _Record) -> PackageReport:
    """The report of a package for which no time was left: what an earlier call made of it counts."""
    if record.repository is None or not record.tasks:
        return PackageReport(package.name, rejected_package="no time was left", unfinished=True)
    return PackageReport(
        package.name,
        version=package.version,
        tests=len(record.repository.passing),
        test_seconds=record.repository.seconds,
        tried=len(record.verdicts),
        tasks=len(record.tasks),
        kinds=dict(Counter(task.id.split(".")[-2] for task in record.tasks)),
        rejected=dict(Counter(verdict.reason for verdict in record.verdicts if verdict.reason)),
        unfinished=True,
    )
