"""A display that is redrawn in place: on a terminal, or below the cell of a notebook."""

from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.live import Live


class LiveDisplay(Protocol):
    """Shows one renderable at a time, each in place of the one before."""

    def start(self) -> None: ...

    def update(self, renderable: Any) -> None: ...

    def stop(self) -> None: ...


def live_display(console: Console) -> LiveDisplay | None:
    """Return the display that `console` can redraw; None where it only takes lines, such as a file."""
    if console.is_jupyter:
        return NotebookDisplay()
    return Live(console=console, refresh_per_second=4) if console.is_terminal else None


class NotebookDisplay:
    """The output of a notebook's cell, redrawn by the kernel's own messages, so that no widgets are needed."""

    def __init__(self) -> None:
        self._handle: Any = None

    def start(self) -> None: ...

    def update(self, renderable: RenderableType) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(renderable, display_id=True)
        else:
            self._handle.update(renderable)

    def stop(self) -> None: ...
