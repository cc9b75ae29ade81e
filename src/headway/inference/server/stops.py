"""Stop strings: find the first one in a text that comes piece by piece, in time linear in the text (Aho-Corasick)."""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """An automaton over `stops`, shared by all choices of a request. States are numbers; a text begins in state 0."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found = [0]
        """Length of the longest stop string that ends in a state, 0 where none does."""
        for stop in stops:
            self._insert(stop)
        self._fallback = [0] * len(self._next)
        self._link()

    def scan(self, state: int, text: str) -> tuple[int, int | None]:
        """Read `text` in `state`; return the new state and the end of the first stop string, or None."""
        for place, character in enumerate(text):
            while state and character not in self._next[state]:
                state = self._fallback[state]
            state = self._next[state].get(character, 0)
            if self._found[state]:
                return state, place + 1
        return state, None

    def length(self, state: int) -> int:
        """Length of the stop string that was found in `state`."""
        return self._found[state]

    def pending(self, state: int) -> int:
        """Characters before `state` that may be the beginning of a stop string."""
        return self._depth[state]

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(0)
            state = self._next[state][character]
        self._found[state] = len(stop)

    def _link(self) -> None:
        """Find for each state the longest proper suffix that begins a stop string, breadth first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                fallback = self._fallback[state]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fallback[fallback]
                self._fallback[child] = self._next[fallback].get(character, 0)
                self._found[child] = self._found[child] or self._found[self._fallback[child]]
                queue.append(child)
