"""The time of a decode step, by the clock of its device."""

import torch


class StepClock:
    """`seconds` follow the decode steps of an accelerator by its own clock. The host's would count the host's work,
    too: a busy host would make steps look long, which are then repeated less, for which the host works more."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.seconds = seconds
        self._device = device

    def mark(self) -> torch.cuda.Event | None:
        """Mark the moment when the device will have done all that was launched so far; None without a clock."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
        event.record()
        return event

    def count(self, started: torch.cuda.Event | None, ended: torch.cuda.Event | None, steps: int) -> None:
        """Take the time between two marks for that of `steps` decode steps."""
        if started is None or ended is None:
            return
        ended.synchronize()
        seconds: float = started.elapsed_time(ended) / 1000 / steps
        self.seconds += 0.2 * (seconds - self.seconds)
