"""What an engine keeps from one update to the next, foremost the trainer's memory: mapping costs more than copying."""

from pathlib import Path

import torch
from torch import Tensor

from headway.core.errors import HeadwayError
from headway.transport.weights import device_memory
from headway.transport.weights.layout import Contents, Layout


class Mappings:
    """Of an engine on `device`. A file that was replaced under its name is mapped anew."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._files: dict[Path, tuple[int, Tensor]] = {}
        self._handles: dict[str, tuple[str, Tensor]] = {}
        self._scratch: dict[torch.device, list[Tensor]] = {}
        self._contents: Contents | None = None

    def contents(self, layout: Layout) -> Contents:
        """What lies where, the same as long as versions lie alike."""
        if self._contents is None or not self._contents.fit(layout):
            self._contents = Contents(layout)
        return self._contents

    def open(self, path: Path, size: int) -> Tensor:
        """The first `size` bytes of a file. Raises HeadwayError where it isn't there or is shorter."""
        try:
            status = path.stat()
            number, data = self._files.get(path, (-1, torch.empty(0, dtype=torch.uint8)))
            if number != status.st_ino and status.st_size >= size:
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
        """`size` bytes in the memory of this engine's GPU. Raises HeadwayError where they are out of reach."""
        if handle not in self._handles:
            self._handles[handle] = (prefix, device_memory.open_handle(handle, size, self.device))
        elif len(self._handles[handle][1]) < size:
            address = self._handles[handle][1].data_ptr()
            self._handles[handle] = (prefix, device_memory.as_bytes(address, size, self.device))
        return self._handles[handle][1][:size]

    def scratch(self, count: int, size: int, *, on_device: bool = False) -> list[Tensor]:
        """Memory for what passes through, the same every time, since new memory is slow at first."""
        device = self.device if on_device else torch.device("cpu")
        kept = self._scratch.get(device, [])
        if len(kept) < count or any(len(buffer) < size for buffer in kept):
            self._contents = None
            pinned = self.device.type == "cuda" and not on_device
            kept = [torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned) for _ in range(count)]
            self._scratch[device] = kept
        return kept[:count]

    def keep(self, prefix: str | None) -> None:
        """Let go of all but what belongs to `prefix`."""
        for path in list(self._files):
            if prefix is None or not path.name.startswith(f"{prefix}-"):
                self._forget(path)
        for handle, (owner, memory) in list(self._handles.items()):
            if owner != prefix:
                del self._handles[handle]
                self._contents = None
                device_memory.close_handle(handle, memory)

    def _forget(self, path: Path) -> None:
        self._contents = None
        _, data = self._files.pop(path, (0, None))
        if data is not None and self.device.type == "cuda":
            device_memory.unpin(data)
