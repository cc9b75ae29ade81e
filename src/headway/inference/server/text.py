"""The text of a reply while its tokens come: whole characters only, cut at stop strings."""

from dataclasses import dataclass, field

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
    stops: list[str] = field(default_factory=list)
    text: str = ""
    stopped: bool = False
    _tokens: list[int] = field(default_factory=list)
    _decoded: int = 0
    _anchor: int = 0
    _sent: int = 0

    def take(self, token_ids: list[int], *, last: bool = False) -> str:
        """Add tokens; the text that may be shown now. `last` releases what was held back."""
        self._tokens += [token for token in token_ids if token not in self.hidden]
        known = self.renderer.decode(self._tokens[self._anchor : self._decoded])
        whole = self.renderer.decode(self._tokens[self._anchor :])
        if len(whole) > len(known) and (last or not whole.endswith(_INCOMPLETE_CHARACTER)):
            self.text += whole[len(known) :]
            self._anchor, self._decoded = self._decoded, len(self._tokens)
        self._cut()
        end = len(self.text) if last or self.stopped else len(self.text) - self._held_back()
        shown = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return shown

    def _cut(self) -> None:
        found = [at for stop in self.stops if (at := self.text.find(stop)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _held_back(self) -> int:
        """Characters at the end that may be the start of a stop string."""
        longest = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
