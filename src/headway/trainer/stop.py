"""Requests to stop: a signal, or one to the whole run. The loop looks when it suits it."""

import signal
from types import FrameType
from typing import Any, Self

from headway.core.control import RunControl

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """A context in which SIGTERM and SIGINT only set a flag: the current step is finished and a checkpoint made."""

    def __init__(self, control: RunControl) -> None:
        self._control = control
        self._signalled = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def asked(self) -> bool:
        return self._signalled or self._control.stop_asked()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
