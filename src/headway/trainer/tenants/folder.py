"""A host's folder of one tenant: who it is, its settings, and the newest checkpoint."""

import shutil
from pathlib import Path

import msgspec

from headway.base.errors import HeadwayError
from headway.base.files import atomic_directory, write_atomic
from headway.core.runs import CHECKPOINT_MARKER
from headway.core.tenants import CHECKPOINT_FILES, NAME


class TenantRecord(msgspec.Struct, frozen=True):
    """A tenant that a host knows. `settings` is JSON, as the tenant sent it; one that was `dropped` may come back."""

    name: str
    token_sha256: str
    settings: str
    dropped: bool = False


class TenantFolder:
    """`tenants/NAME/` in the folder of a host: written whole or not at all, so that a crash leaves the state before."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, record: TenantRecord) -> None:
        write_atomic(self._root / "tenant.json", msgspec.json.encode(record))
        (self._root / "tenant.json").chmod(0o600)

    def step_folder(self, step: int) -> Path:
        return self._root / f"step_{step:06d}"

    def newest(self) -> Path | None:
        """Return the newest checkpoint, which is the only one that matters."""
        return max((marker.parent for marker in self._root.glob(f"step_*/{CHECKPOINT_MARKER}")), default=None)

    def receive(self, files: dict[str, bytes]) -> Path:
        """Write a checkpoint that a tenant sent, beside its others. Raises HeadwayError where it is none."""
        return write_files(files, self._root / "received")

    def accept(self, received: Path | None, step: int) -> None:
        """Put a received checkpoint, now that it was read, in the place of all others; without one, remove those."""
        self.keep(None)
        if received is not None:
            received.rename(self.step_folder(step))

    def keep(self, step: int | None) -> None:
        """Remove all checkpoints but that of `step`."""
        for old in self._root.glob("step_*"):
            if step is None or old != self.step_folder(step):
                shutil.rmtree(old, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def write_files(files: dict[str, bytes], folder: Path) -> Path:
    """Write a checkpoint's files, whole or not at all. Raises HeadwayError where they are not those of a checkpoint."""
    if set(files) != set(CHECKPOINT_FILES):
        raise HeadwayError(f"a tenant's checkpoint has the files {', '.join(CHECKPOINT_FILES)}")
    with atomic_directory(folder) as aside:
        for name in CHECKPOINT_FILES:
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_bytes(files[name])
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in CHECKPOINT_FILES}


def known_tenants(root: Path) -> list[tuple[TenantRecord, TenantFolder]]:
    """Read the tenants of a host's folder. Raises HeadwayError where a record is damaged."""
    found = []
    for file in sorted(root.glob("*/tenant.json")):
        try:
            record = msgspec.json.decode(file.read_bytes(), type=TenantRecord)
        except msgspec.DecodeError as error:
            raise HeadwayError(
                f"{file} is damaged ({error}); remove {file.parent}, and the tenant joins anew"
            ) from None
        if record.name == file.parent.name and NAME.fullmatch(record.name):
            found.append((record, TenantFolder(file.parent)))
    return found
