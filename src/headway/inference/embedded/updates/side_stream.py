"""A CUDA stream for work beside the engine's steps, so that neither waits for the other."""

from types import TracebackType

import torch


class SideStream:
    """A context for one thread at a time that synchronizes at its end. Does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch has no types
        self._inside: torch.cuda.StreamContext | None = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()  # type: ignore[no-untyped-call]  # nor here

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._stream is not None and self._inside is not None:
            self._stream.synchronize()
            self._inside.__exit__(kind, error, at)

    def wait_for_current(self) -> None:
        """Make the side stream wait for all work queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
