"""The table of recorded rollouts that detectors read: one row for each agent of an episode."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.core.episodes import AUDIT, Task
from headway.core.messages import Message, ToolCall
from headway.core.records import recorded_steps, rollout_lines
from headway.core.runs import RunPaths
from headway.monitor.audit.finding import Example
from headway.monitor.tail import LONGEST_LINE

Floats = NDArray[np.float64]
Marks = NDArray[np.bool_]

MOST_STEPS = 60
"""Steps that are read, spread over the run: enough for a trend, and a long run is audited in seconds, too."""
MOST_ROWS = 512
"""Rows of one step that are read."""
LONGEST = 4000
"""Characters of a text that are looked at: its beginning and its end."""
EXAMPLES = 3


@dataclass(frozen=True)
class Row:
    """The part of one agent in an episode. `prompt` is all before its first reply, `reply` its last one."""

    step: int
    line: int
    group: str
    task: str
    reward: float
    prompt: str
    reply: str
    calls: tuple[ToolCall, ...] = ()
    audits: dict[str, float] = field(default_factory=dict)
    data: tuple[str, ...] = ()
    """Texts of the task's data, among which its answer may be."""


class RolloutTable:
    """The rows of one environment, in the order of steps, and their columns."""

    def __init__(self, env: str, rows: Sequence[Row]) -> None:
        self.env = env
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def steps(self) -> Floats:
        return np.array([row.step for row in self.rows], dtype=np.float64)

    @cached_property
    def rewards(self) -> Floats:
        return np.array([row.reward for row in self.rows], dtype=np.float64)

    @cached_property
    def groups(self) -> NDArray[np.intp]:
        """The number of each row's group: its members had the same prompt and are compared with each other."""
        numbers: dict[str, int] = {}
        return np.array([numbers.setdefault(row.group, len(numbers)) for row in self.rows], dtype=np.intp)

    @cached_property
    def late(self) -> Marks:
        """Rows of the last third of the steps."""
        return self.steps >= np.quantile(np.unique(self.steps), 2 / 3) if len(self) else np.zeros(0, dtype=bool)

    @cached_property
    def early(self) -> Marks:
        """Rows of the first third of the steps."""
        return self.steps <= np.quantile(np.unique(self.steps), 1 / 3) if len(self) else np.zeros(0, dtype=bool)

    def tasks(self, chosen: Marks) -> int:
        """Count the different tasks among chosen rows."""
        return len({self.rows[i].task for i in np.flatnonzero(chosen)})

    def examples(self, chosen: Marks) -> tuple[Example, ...]:
        """The newest of the chosen rows that earned most, each of another group."""
        best = sorted(np.flatnonzero(chosen), key=lambda i: (-self.rewards[i], -self.steps[i]))
        found: dict[str, Example] = {}
        for row in (self.rows[i] for i in best):
            text = row.reply or " ".join(f"{call.name}({call.arguments})" for call in row.calls)
            found.setdefault(row.group, Example(row.step, row.line, row.group, row.reward, text[:160]))
            if len(found) == EXAMPLES:
                break
        return tuple(found.values())


def read_tables(paths: RunPaths) -> list[RolloutTable]:
    """Read the recorded rollouts of a run, one table for each environment. What is damaged or gone is left out."""
    steps = recorded_steps(paths)
    chosen = sorted({steps[round(place)] for place in np.linspace(0, len(steps) - 1, MOST_STEPS)}) if steps else []
    rows: dict[str, list[Row]] = {}
    for step in chosen:
        for line, record in _read_step(paths, step):
            rows.setdefault(record.env, []).extend(_rows(record, step, line))
    return [RolloutTable(env, found) for env, found in sorted(rows.items()) if found]


class _Node(msgspec.Struct):
    message: Message | None = None
    logprobs: msgspec.Raw = msgspec.Raw()

    @property
    def sampled(self) -> bool:
        return bytes(self.logprobs) not in (b"", b"null")


class _Trace(msgspec.Struct):
    agent: str = "policy"
    nodes: list[_Node] = []
    reward: float = 0.0
    metrics: dict[str, float] = {}
    problem: str | None = None


class _Episode(msgspec.Struct):
    task: Task
    traces: list[_Trace] = []
    error: msgspec.Raw = msgspec.Raw()


class _Record(msgspec.Struct):
    """The fields of a record that are looked at; the decoder skips the rest, tokens above all."""

    env: str
    group: str
    episode: _Episode


def _read_step(paths: RunPaths, step: int) -> Iterator[tuple[int, _Record]]:
    lines = list(rollout_lines(paths.rollout_records(step), LONGEST_LINE))
    decode = msgspec.json.Decoder(_Record).decode
    # Whole groups: rollouts of one group follow each other, and are compared with each other.
    for line in range(min(len(lines), MOST_ROWS)):
        try:
            record = decode(lines[line])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if bytes(record.episode.error) in (b"", b"null"):
            yield line, record


def _rows(record: _Record, step: int, line: int) -> Iterator[Row]:
    """Make the rows of one record. An agent of a game is compared with the same agent in other games alone."""
    traces = [trace for trace in record.episode.traces if any(node.sampled for node in trace.nodes)]
    for trace in traces:
        first = next(index for index, node in enumerate(trace.nodes) if node.sampled)
        asked = [node.message.content for node in trace.nodes[:first] if node.message is not None]
        said = [node.message for node in trace.nodes if node.sampled and node.message is not None]
        audits = {name.removeprefix(AUDIT): value for name, value in trace.metrics.items() if name.startswith(AUDIT)}
        yield Row(
            step=step,
            line=line,
            group=f"{record.group}/{trace.agent}/{trace.problem or ''}" if len(traces) > 1 else record.group,
            task=trace.problem or record.episode.task.id,
            reward=trace.reward,
            prompt=_shortened("\n".join(asked)),
            reply=_shortened(said[-1].content if said else ""),
            calls=tuple(call for message in said for call in message.tool_calls),
            audits=audits,
            data=tuple(_texts(record.episode.task.data)),
        )


def _texts(value: Any) -> Iterator[str]:
    """Find the texts and numbers inside a task's data."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)[:LONGEST]
    elif isinstance(value, dict | list | tuple):
        items: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for item in items:
            yield from _texts(item)


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST // 2] + text[-LONGEST // 2 :]
