"""Tasks of software engineering: their format on disk, in a folder of JSON lines and archives named by content."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import msgspec

from headway.base.errors import UsageError
from headway.base.files import write_atomic
from headway.envs.swe.archives import File, Files, compress, digest, pack, unpack
from headway.envs.swe.patches import apply_patch, touched

FORMAT = 1
TASKS, REPOSITORIES, ARCHIVES, ROOTS = "tasks.jsonl", "repositories.jsonl", "repositories", "roots"


class Repository(msgspec.Struct, frozen=True, omit_defaults=True):
    """A repository that is whole: its tests pass. `archive` is the SHA-256 of its tar archive."""

    id: str
    archive: str
    root: str
    """The folder below `roots` with the packages that it and its tests need; "" for those of this interpreter."""
    path: list[str]
    """Folders to import it from, such as "src"."""
    sources: list[str]
    """Files and folders of its own code; of an agent's work only what is changed here counts."""
    tests: list[str]
    """Test files."""
    passing: list[str]
    """Ids of the tests that pass, whenever they run."""
    seconds: float = 0.0
    """Time that all tests took when they were first run."""


class SweTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """An issue in a repository, and the tests that tell if it is resolved.

    A task that Headway made has a `repository`; one that was read from another project's file has an `image` instead.
    """

    id: str
    issue: str
    fail_to_pass: list[str]
    repository: str = ""
    pass_to_pass: list[str] | None = None
    """None: all other tests of the repository that pass."""
    patch: str = ""
    """The oracle: a unified diff from the broken state to one that passes. Its reverse is the bug."""
    kinds: list[str] = []
    """Kinds of the bugs that were planted."""
    image: str = ""
    """The container image that holds the repository, broken, in `folder`."""
    folder: str = ""
    commit: str = ""
    bug_patch: str = ""
    """Applied to the image's folder before the agent sees it."""
    test_patch: str = ""
    """Applied before grading."""
    test_files: dict[str, str] = {}
    """Written before grading."""


class TaskFolder:
    """A folder of tasks: `tasks.jsonl`, `repositories.jsonl`, archives by content, and roots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tasks(self) -> list[SweTask]:
        return read_lines(self.folder / TASKS, SweTask)

    def repositories(self) -> dict[str, Repository]:
        return {one.id: one for one in read_lines(self.folder / REPOSITORIES, Repository)}

    def write(self, repositories: Iterable[Repository], tasks: Iterable[SweTask]) -> None:
        """Write both lists; tasks last, so that every task that can be read has its repository."""
        write_lines(self.folder / REPOSITORIES, repositories)
        write_lines(self.folder / TASKS, tasks)

    def store(self, files: dict[str, File]) -> str:
        """Keep an archive of `files`; returns its name."""
        archive = pack(files)
        path = self.folder / ARCHIVES / f"{digest(archive)}.tar.gz"
        if not path.exists():
            write_atomic(path, compress(archive))
        return digest(archive)

    def files(self, repository: Repository) -> dict[str, File]:
        """Read the repository's files. Raises UsageError where they are not those that the tasks were made from."""
        return _read_archive(self.folder / ARCHIVES / f"{repository.archive}.tar.gz")

    def root(self, repository: Repository) -> Path | None:
        """The folder with the packages that the repository needs."""
        if not repository.root:
            return None
        folder = (self.folder / ROOTS / repository.root).absolute()
        if not folder.is_dir():
            raise UsageError(
                f"{folder} is missing: copy the whole folder of tasks, or make it again with `headway swe make`"
            )
        return folder


def broken_files(files: Files, task: SweTask) -> dict[str, File]:
    """The repository as the issue's author found it, tests included: an image's with the task's bugs planted, one of
    ours with the repair taken back."""
    return patched(files, task.bug_patch) if task.image else patched(files, task.patch, reverse=True)


def with_tests(files: Files, task: SweTask) -> dict[str, File]:
    """Bring the tests that judge, where the repository does not have them."""
    return patched(files, task.test_patch) | {path: File(text.encode()) for path, text in task.test_files.items()}


def hidden_files(task: SweTask) -> set[str]:
    """Test files that the agent does not get: those of the tests that must be made to pass, unless they are brought."""
    if task.test_patch or task.test_files:
        return set()
    return {name.partition("::")[0] for name in task.fail_to_pass}


def patched(files: Files, patch: str, *, reverse: bool = False) -> dict[str, File]:
    texts = {path: files[path].data.decode() for path in touched(patch) if path in files}
    changed = dict(files)
    for path, text in apply_patch(texts, patch, reverse=reverse).items():
        if text is None:
            changed.pop(path, None)
        else:
            changed[path] = File(text.encode(), path in files and files[path].executable)
    return changed


_Record = TypeVar("_Record", bound=msgspec.Struct)


def read_lines(path: Path, kind: type[_Record]) -> list[_Record]:
    """Read a JSONL file. Raises UsageError, with the line, where one is not a `kind`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; `headway swe make` makes a folder of tasks") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(msgspec.json.decode(line, type=kind))
        except msgspec.DecodeError as error:
            raise UsageError(f"{path}:{number}: {error}") from error
    return records


def write_lines(path: Path, records: Iterable[msgspec.Struct] | Sequence[msgspec.Struct]) -> None:
    write_atomic(path, b"".join(msgspec.json.encode(record) + b"\n" for record in records))


@lru_cache(maxsize=64)
def _read_archive(path: Path) -> dict[str, File]:
    try:
        files = unpack(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; copy the whole folder of tasks") from error
    found = digest(pack(files))
    if found != path.name.removesuffix(".tar.gz"):
        raise UsageError(f"{path}: its content is not what its name says (SHA-256 {found}); copy it again")
    return files
