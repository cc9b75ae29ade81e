"""The beginning of what the policy said in each rollout, read from the records of a step when a list shows them."""

import time
from collections import OrderedDict
from typing import Any

import msgspec

from headway.monitor.dashboard.index import RolloutIndex

LENGTH = 120
"""Characters of a preview."""
KEPT_STEPS = 256
SECONDS = 0.7
"""A list answers after this long with the previews it has; the next look at it finds the others."""


UNSAMPLED = (b"", b"null")
"""The field `logprobs` of what the policy did not sample."""


class _Message(msgspec.Struct):
    content: str = ""


class _Node(msgspec.Struct):
    message: _Message | None = None
    logprobs: msgspec.Raw = msgspec.Raw()


class _Trace(msgspec.Struct):
    nodes: list[_Node] = msgspec.field(default_factory=list)


class _Episode(msgspec.Struct):
    traces: list[_Trace] = msgspec.field(default_factory=list)


class _Line(msgspec.Struct):
    """The fields of a record that hold texts; the decoder skips the rest."""

    episode: _Episode = msgspec.field(default_factory=_Episode)


class Previews:
    """Previews of a run's rollouts, by step; those of the last few hundred steps are kept."""

    def __init__(self, index: RolloutIndex) -> None:
        self._index = index
        self._kept: OrderedDict[tuple[int, object], list[str]] = OrderedDict()

    def add_to(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Give each row of the index its `text`; None where the time was up before its file was read."""
        until = time.monotonic() + SECONDS
        for row in rows:
            texts = self._of_step(row["step"], late=time.monotonic() > until)
            row["text"] = None if texts is None else texts[row["line"]] if row["line"] < len(texts) else ""
        return rows

    def _of_step(self, step: int, *, late: bool) -> list[str] | None:
        key = (step, self._index.stamp(step))
        if key not in self._kept:
            if late:
                return None
            self._kept[key] = [_preview(line) for line in self._index.records(step)]
            while len(self._kept) > KEPT_STEPS:
                self._kept.popitem(last=False)
        return self._kept[key]


def _preview(line: bytes) -> str:
    """Return the beginning of the first text that the policy sampled."""
    try:
        record = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    sampled = (node for trace in record.episode.traces for node in trace.nodes if bytes(node.logprobs) not in UNSAMPLED)
    said = (node.message.content for node in sampled if node.message is not None and node.message.content)
    return " ".join(next(said, "")[: 4 * LENGTH].split())[:LENGTH]
