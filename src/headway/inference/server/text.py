"""The text of a reply while its tokens come: whole characters only, cut at stop strings."""

from dataclasses import dataclass, field

from headway.inference.server.stops import StopStrings
from headway.rendering.base import Renderer

_INCOMPLETE_CHARACTER = "�"


@dataclass(slots=True)
class Text:
    """The text of one choice while its tokens come. `take` returns what is certain to stay.

    A character whose bytes are spread over tokens is held back until it is whole, and so is whatever may be
    the beginning of a stop string.
    """

    renderer: Renderer
    hidden: frozenset[int]
    stops: StopStrings | None = None
    stopped: bool = False
    _pieces: list[str] = field(default_factory=list)
    _state: int = 0
    _held: str = ""
    """Text that may be the beginning of a stop string."""
    _tokens: list[int] = field(default_factory=list)
    _decoded: int = 0
    _anchor: int = 0

    @property
    def text(self) -> str:
        """The text so far, held back or not."""
        return "".join(self._pieces) + self._held

    def take(self, token_ids: list[int], *, last: bool = False) -> str:
        """Add tokens; the text that may be shown now. `last` releases what was held back."""
        self._tokens += [token for token in token_ids if token not in self.hidden]
        known = self.renderer.decode(self._tokens[self._anchor : self._decoded])
        whole = self.renderer.decode(self._tokens[self._anchor :])
        if len(whole) > len(known) and (last or not whole.endswith(_INCOMPLETE_CHARACTER)):
            shown = self._release(whole[len(known) :], last)
            self._anchor, self._decoded = self._decoded, len(self._tokens)
        else:
            shown = self._release("", last)
        self._pieces.append(shown)
        return shown

    def _release(self, added: str, last: bool) -> str:
        """The text before a stop string, or all that cannot become one any more."""
        if self.stopped:
            return ""
        if self.stops is None:
            return added
        text = self._held + added
        self._state, end = self.stops.scan(self._state, added)
        if end is not None:
            self.stopped, self._held = True, ""
            return text[: len(text) - len(added) + end - self.stops.length(self._state)]
        keep = len(text) if last else len(text) - self.stops.pending(self._state)
        self._held = text[keep:]
        return text[:keep]
