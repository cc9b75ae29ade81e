"""The record of a run's environments: which code each was loaded from, kept so that a resumed run goes on with it."""

import time
from collections.abc import Sequence

import msgspec

from headway.base.errors import PermanentError
from headway.base.files import write_atomic
from headway.core.runs import RunPaths
from headway.envs.packages.versions import CodeVersion


class UsedEnvironment(msgspec.Struct, frozen=True):
    """An environment of a run, by its name there, and the packages and files that its workers loaded."""

    name: str
    id: str
    code: list[CodeVersion]


class Replaced(msgspec.Struct, frozen=True):
    """Environments of earlier attempts, until the user accepted others."""

    until: float
    environments: list[UsedEnvironment]


class EnvironmentRecord(msgspec.Struct):
    """`environments` are what the run goes on with; it may lack those that were not used yet."""

    environments: list[UsedEnvironment] = []
    replaced: list[Replaced] = []


def read_environments(paths: RunPaths) -> EnvironmentRecord:
    """Read a run's record; an empty one of a run that has none yet. Raises PermanentError where it is damaged."""
    try:
        return msgspec.json.decode(paths.environments.read_bytes(), type=EnvironmentRecord)
    except FileNotFoundError:
        return EnvironmentRecord()
    except msgspec.DecodeError as error:
        raise PermanentError(
            f"{paths.environments} is damaged ({error}); with --accept-changed-envs the run goes on with the "
            "environments of now"
        ) from None


def record_environments(paths: RunPaths, used: Sequence[UsedEnvironment]) -> None:
    """Record what a run uses. Raises PermanentError where the same environment had other code before.

    Settings that name another environment, or more of them, are the user's own change, and recorded.
    """
    record = read_environments(paths)
    known = {(env.name, env.id): env for env in record.environments}
    for env in used:
        before = known.get((env.name, env.id))
        if before is not None and before.code != env.code:
            raise PermanentError(_changed(paths, before, env))
    known |= {(env.name, env.id): env for env in used}
    _write(paths, EnvironmentRecord(list(known.values()), record.replaced))


def accept_changed(paths: RunPaths) -> None:
    """Let a run go on with other code: what it used so far is kept as replaced, and the next start is recorded."""
    try:
        record = read_environments(paths)
    except PermanentError:
        record = EnvironmentRecord()
    earlier = [Replaced(time.time(), record.environments)] if record.environments else []
    _write(paths, EnvironmentRecord([], [*record.replaced, *earlier]))


def _changed(paths: RunPaths, before: UsedEnvironment, now: UsedEnvironment) -> str:
    names = f'environment "{now.name}"'
    was = ", ".join(str(code) for code in before.code if code not in now.code) or "nothing else"
    found = ", ".join(str(code) for code in now.code if code not in before.code) or "nothing else"
    return (
        f"{names}: the run began with {was}, and {found} is there now; rewards before and after would not compare. "
        "Bring the first one back (`headway env add NAME==VERSION`), or go on with the one of now: "
        f"`headway rl --resume {paths.root} --accept-changed-envs`"
    )


def _write(paths: RunPaths, record: EnvironmentRecord) -> None:
    write_atomic(paths.environments, msgspec.json.format(msgspec.json.encode(record), indent=2))
