"""Work beside the steps of an engine: on a GPU in a stream of its own, so that neither waits for the other."""

from types import TracebackType

import torch


class SideStream:
    """A context for one thread at a time; at its end all that was begun inside is done. On a CPU it is nothing."""

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
        """What comes next on the side begins after all that the calling thread's stream was given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
