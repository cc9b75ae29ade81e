"""Planting of bugs in a surveyed repository: candidates in a seeded order, each tried in sandboxes."""

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from headway.envs.swe.archives import File
from headway.envs.swe.grader import grade, is_source, outcomes_of
from headway.envs.swe.make.issues import write_issue
from headway.envs.swe.make.mutations import KINDS, SEVERAL, Mutation, mutations, plant
from headway.envs.swe.make.observing import Failure, observe
from headway.envs.swe.make.survey import Survey
from headway.envs.swe.patches import make_patch
from headway.envs.swe.runtime import snapshot_of
from headway.envs.swe.tasks import SweTask
from headway.envs.swe.workplace import Workplace
from headway.sandboxes.pool import SandboxPool
from headway.sandboxes.sandbox import Limits, SandboxError

QUICK_SECONDS = 8.0
"""Repositories whose tests take less run all of them at once; others first those that run the changed lines."""
MOST_BROKEN = 0.5
TRY_SECONDS = 30.0

# Reasons for which a candidate is rejected, as the report counts them.
NO_CHANGE = "the change is no other program"
UNNOTICED = "no test noticed it"
TOO_BROKEN = "it breaks more than half of the tests"
NO_REPORT = "its tests gave no report (they hang, or it does not import)"
UNSTABLE = "two runs of its tests differ"
NOT_HEALED = "restoring does not heal it"
TWIN = "another task has the same change"


@dataclass(frozen=True)
class Candidate:
    """Bugs to plant in one file, and the tests that run the changed lines."""

    path: str
    mutations: tuple[Mutation, ...]
    kind: str
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        changes = [(self.path, m.start, m.end, m.text.decode()) for m in self.mutations]
        return hashlib.sha256(repr(changes).encode()).hexdigest()[:16]


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """A candidate's outcome: a task, or the reason for which there is none."""

    key: str
    kind: str
    task: SweTask | None = None
    reason: str = ""


def candidates(survey: Survey, seed: int, kinds: Sequence[str] = (*KINDS, SEVERAL)) -> list[Candidate]:
    """All bugs at lines that tests run, in an order that the seed decides: kinds take turns, and so do functions."""
    rng = random.Random(f"{seed} {survey.repository.id}")
    passing = set(survey.repository.passing)
    by_kind: dict[str, list[Candidate]] = defaultdict(list)
    for path in sorted(survey.files):
        if not is_source(path, survey.repository) or path not in survey.coverage.lines:
            continue
        looked_at = []
        for mutation in mutations(survey.files[path].data):
            tests = survey.coverage.tests(path, mutation.first, mutation.last) & passing
            if tests:
                looked_at.append(Candidate(path, (mutation,), mutation.kind, tuple(sorted(tests))))
        for candidate in looked_at:
            by_kind[candidate.kind].append(candidate)
        by_kind[SEVERAL] += _several(looked_at, rng)
    queues = [_functions_in_turn(by_kind[kind], rng) for kind in kinds]
    return [queue[turn] for turn in range(max(map(len, queues), default=0)) for queue in queues if turn < len(queue)]


def _several(looked_at: list[Candidate], rng: random.Random) -> list[Candidate]:
    """Two or three bugs at different lines of one file, one set for every five single ones."""
    found = []
    for _ in range(len(looked_at) // 5):
        chosen = sorted(rng.sample(looked_at, min(len(looked_at), rng.choice((2, 2, 3)))), key=lambda c: c.mutations)
        lines = [(one.mutations[0].first, one.mutations[0].last) for one in chosen]
        if len(chosen) > 1 and all(a[1] < b[0] for a, b in pairwise(lines)):
            tests = sorted({name for one in chosen for name in one.tests})
            together = tuple(one.mutations[0] for one in chosen)
            found.append(Candidate(chosen[0].path, together, SEVERAL, tuple(tests)))
    return found


def _functions_in_turn(found: list[Candidate], rng: random.Random) -> list[Candidate]:
    shuffled = rng.sample(found, len(found))
    seen: Counter[tuple[str, str]] = Counter()
    turns: list[tuple[int, int, Candidate]] = []
    for candidate in shuffled:
        function = candidate.path, candidate.mutations[0].function
        turns.append((seen[function], len(turns), candidate))
        seen[function] += 1
    return [candidate for _, _, candidate in sorted(turns, key=lambda turn: turn[:2])]


class Planter:
    """Tries candidates of one surveyed repository in sandboxes of a pool."""

    def __init__(self, pool: SandboxPool, survey: Survey, limits: Limits, seed: int) -> None:
        self._pool, self._survey, self._limits, self._seed = pool, survey, limits, seed

    async def try_candidate(self, candidate: Candidate) -> Verdict:
        """Plant, see which tests break, write the task, and see that restoring heals."""
        try:
            made = await self._try(candidate)
        except SandboxError as error:
            made = f"a sandbox failed: {str(error)[:80]}"
        if isinstance(made, SweTask):
            return Verdict(candidate.key, candidate.kind, made)
        return Verdict(candidate.key, candidate.kind, None, made)

    async def _try(self, candidate: Candidate) -> SweTask | str:
        survey = self._survey
        whole = survey.files[candidate.path]
        planted = plant(whole.data, candidate.mutations)
        if planted is None:
            return NO_CHANGE
        broken = survey.files | {candidate.path: File(planted, whole.executable)}
        found = await self._break(candidate, broken)
        if isinstance(found, str):
            return found
        failed, failures = found
        task = self._task(candidate, planted, failed, failures)
        place = Workplace(self._pool, survey.repository, survey.files, survey.runtime)
        healed = await grade(place, task, snapshot_of(survey.files), self._limits)
        return task if healed.resolved else NOT_HEALED

    async def _break(self, candidate: Candidate, broken: dict[str, File]) -> tuple[list[str], list[Failure]] | str:
        """Find the tests that fail: first those that run the changed lines, then all, which must agree."""
        repository, runtime = self._survey.repository, self._survey.runtime
        quick = repository.seconds < QUICK_SECONDS
        only = None if quick else candidate.tests
        tests = repository.tests if only is None else sorted({name.partition("::")[0] for name in only})
        seconds = max(TRY_SECONDS, 5 * repository.seconds)
        snapshot = snapshot_of(broken)
        owner = repository.id
        async with self._pool.sandbox(runtime.recipe, self._limits, snapshot=snapshot, owner=owner) as box:
            outcomes, failures = await observe(box, runtime, tests, only=only, seconds=seconds)
        looked_at = repository.passing if only is None else list(only)
        failed = [name for name in looked_at if outcomes.get(name) != "passed"]
        if reason := self._unfit(failed, looked_at, outcomes):
            return reason
        if not quick:
            everything = await outcomes_of(self._pool, repository, broken, runtime, self._limits)
            first, failed = failed, [name for name in repository.passing if everything.get(name) != "passed"]
            if not set(first) <= set(failed):
                return UNSTABLE
            if reason := self._unfit(failed, repository.passing, everything):
                return reason
        return failed, [failure for failure in failures if failure.id in set(failed)]

    def _unfit(self, failed: list[str], looked_at: Sequence[str], outcomes: dict[str, str]) -> str:
        if not outcomes or not any(name in outcomes for name in looked_at):
            return NO_REPORT
        if not failed:
            return UNNOTICED
        if len(failed) > MOST_BROKEN * len(self._survey.repository.passing):
            return TOO_BROKEN
        return ""

    def _task(self, candidate: Candidate, planted: bytes, failed: list[str], failures: list[Failure]) -> SweTask:
        survey, path = self._survey, candidate.path
        patch = make_patch({path: planted.decode()}, {path: survey.files[path].data.decode()})
        rng = random.Random(f"{self._seed} {candidate.key}")
        told = failures or [Failure(name, "call", "", "the test did not run") for name in failed]
        return SweTask(
            id=f"{survey.repository.id}.{candidate.kind}.{candidate.key[:8]}",
            repository=survey.repository.id,
            issue=write_issue(survey.name, survey.version, told, survey.files, rng),
            fail_to_pass=failed,
            patch=patch,
            kinds=sorted({mutation.kind for mutation in candidate.mutations}),
        )
