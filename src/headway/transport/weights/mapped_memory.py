"""Memory that an engine keeps from one update to the next, since mapping it costs more than copying from it."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.config.shared import TlsSettings
from headway.transport.weights import device_memory
from headway.transport.weights.layout import Contents, Layout


class Relay(Protocol):
    """Passes on what an engine has of a version."""

    def drop(self) -> None:
        """Pass the version on no more: it was refused here."""
        ...

    def close(self) -> None: ...


class MappedMemory:
    """The trainer's memory as an engine on `device` maps it, memory for what passes through, and what passes it on."""

    def __init__(self, device: torch.device | str = "cpu", tls: TlsSettings | None = None) -> None:
        self.device = torch.device(device)
        self.tls = tls or TlsSettings()
        self._files: dict[Path, tuple[int, Tensor]] = {}
        self._handles: dict[str, tuple[str, Tensor]] = {}
        self._scratch: dict[torch.device, list[Tensor]] = {}
        self._contents: Contents | None = None
        self.relays: dict[str, Relay] = {}
        """What passes versions on to other engines, by transport."""

    def contents(self, layout: Layout) -> Contents:
        """The parts in each piece; the same object as long as versions have the same layout."""
        if self._contents is None or not self._contents.fit(layout):
            self._contents = Contents(layout)
        return self._contents

    def forget_views(self) -> None:
        """Let go of memory that is not used any more."""
        self._contents = None

    def open(self, path: Path, size: int) -> Tensor:
        """Map the first `size` bytes of a file. Raises HeadwayError where it is missing or shorter.

        A file that was replaced under its name is mapped again."""
        try:
            status = path.stat()
            inode, data = self._files.get(path, (-1, torch.empty(0, dtype=torch.uint8)))
            if inode != status.st_ino and status.st_size >= size:
                self._forget(path)
                data = torch.from_file(str(path), shared=True, size=status.st_size, dtype=torch.uint8)
                self._files[path] = (status.st_ino, data)
                if self.device.type == "cuda":
                    device_memory.pin(data)
        except (OSError, RuntimeError) as error:
            raise HeadwayError(f"{path}: cannot map a segment of weights ({error})") from None
        if min(status.st_size, len(data)) < size:
            raise HeadwayError(f"{path}: a segment of weights is shorter than the {size} bytes announced")
        return data[:size]

    def open_handle(self, prefix: str, handle: str, size: int) -> Tensor:
        """Map `size` bytes in the memory of this engine's GPU. Raises HeadwayError where they can't be opened."""
        if handle not in self._handles:
            self._handles[handle] = (prefix, device_memory.open_handle(handle, size, self.device))
        elif len(self._handles[handle][1]) < size:
            address = self._handles[handle][1].data_ptr()
            self._handles[handle] = (prefix, device_memory.as_bytes(address, size, self.device))
        return self._handles[handle][1][:size]

    def scratch(self, count: int, size: int, *, on_device: bool = False) -> list[Tensor]:
        """Return `count` buffers for what passes through, the same every time, since new memory is slow at first."""
        device = self.device if on_device else torch.device("cpu")
        kept = self._scratch.get(device, [])
        if len(kept) < count or any(len(buffer) < size for buffer in kept):
            self._contents = None
            pinned = self.device.type == "cuda" and not on_device
            kept = [torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned) for _ in range(count)]
            self._scratch[device] = kept
        return kept[:count]

    def release(self, keep: str | None = None) -> None:
        """Unmap the trainer's memory, except what belongs to the trainer with prefix `keep`."""
        for path in list(self._files):
            if keep is None or not path.name.startswith(f"{keep}-"):
                self._forget(path)
        for handle, (owner, memory) in list(self._handles.items()):
            if owner != keep:
                del self._handles[handle]
                self._contents = None
                device_memory.close_handle(handle, memory)

    def _forget(self, path: Path) -> None:
        self._contents = None
        _, data = self._files.pop(path, (0, None))
        if data is not None and self.device.type == "cuda":
            device_memory.unpin(data)
