"""A run at Weights & Biases: one for all its processes, with its settings, and continued when the run is."""

import math
import uuid
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from typing import Any

import msgspec

from headway.base.errors import HeadwayError, UsageError
from headway.base.extras import install_command
from headway.base.files import write_atomic
from headway.config.shared import WandbSettings
from headway.core.records import RolloutRecord, read_rollouts
from headway.core.runs import RunPaths
from headway.monitor.dashboard.summary import read_settings

TABLES = 20
"""Tables of rollouts that a run sends, spread over its steps."""
TABLE_ROWS = 16
LONGEST_TEXT = 4000
"""Characters of a text in a table."""


class _Sent(msgspec.Struct):
    """The run's id at W&B, and the newest step that was sent of each axis."""

    id: str
    steps: dict[str, int] = msgspec.field(default_factory=dict)


class WandbRun:
    """Sends lines of metrics: the trainer's `loss` is `trainer/loss` over `trainer/step`; evaluations have `eval/step`.

    The id and the newest steps are kept in the run folder, so that a resumed run continues the same one at W&B and
    sends each step once. `part` tells apart processes of a run that were started one by one.
    """

    def __init__(self, settings: WandbSettings, paths: RunPaths, part: str = "") -> None:
        """Raises UsageError where the package is missing, or W&B refuses the run."""
        if find_spec("wandb") is None:
            raise UsageError(f"tracking.wandb needs a package: {install_command('tracking')}")
        import wandb

        self._wandb: Any = wandb
        self._paths = paths
        self._file = paths.metrics / f"{'-'.join(filter(None, ('wandb', part)))}.json"
        self._sent = self._load() or _Sent(uuid.uuid4().hex[:12])
        config = read_settings(paths)
        self._table_interval = max(1, int(config.get("max_steps") or 0) // TABLES)
        name = "-".join(filter(None, (paths.root.name, part)))
        try:
            self._run: Any = wandb.init(
                project=settings.project,
                entity=settings.entity,
                tags=settings.tags,
                mode=settings.mode,
                name=name,
                id=self._sent.id,
                resume="allow",
                config=config,
                dir=str(paths.metrics),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise UsageError(f'tracking.wandb: {error}; log in with `wandb login`, or set mode = "offline"') from None
        self._axes: set[str] = set()
        self._save()

    def update(self, process: str, line: Mapping[str, float]) -> None:
        """Send a line of a process's metrics, unless its step was sent before."""
        step = int(line["step"])
        values = {name: value for name, value in line.items() if name not in ("step", "time")}
        evaluation = {name.removeprefix("eval/"): value for name, value in values.items() if name.startswith("eval/")}
        others = {name: value for name, value in values.items() if not name.startswith("eval/")}
        self._send("eval", step, evaluation)
        if self._send(process, step, others) and process == "orchestrator" and step % self._table_interval == 0:
            self._send_rollouts(step)

    def close(self) -> None:
        self._run.finish()

    def _send(self, axis: str, step: int, values: Mapping[str, float]) -> bool:
        if not values or step <= self._sent.steps.get(axis, -1):
            return False
        if axis not in self._axes:
            self._axes.add(axis)
            self._run.define_metric(f"{axis}/step", hidden=True)
            self._run.define_metric(f"{axis}/*", step_metric=f"{axis}/step")
        finite = {f"{axis}/{name}": value for name, value in values.items() if math.isfinite(value)}
        self._run.log({f"{axis}/step": step, **finite})
        self._sent.steps[axis] = step
        self._save()
        return True

    def _send_rollouts(self, step: int) -> None:
        """Send the first rollouts of a step as a table, where they were recorded."""
        with suppress(HeadwayError):
            rows = [_row(record) for record in islice(read_rollouts(self._paths, step), TABLE_ROWS)]
            table = self._wandb.Table(columns=["step", "environment", "task", "reward", "said", "reply"], data=rows)
            self._run.log({"orchestrator/step": step, "rollouts": table})

    def _load(self) -> _Sent | None:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_Sent)
        except (OSError, msgspec.MsgspecError):
            return None

    def _save(self) -> None:
        write_atomic(self._file, msgspec.json.encode(self._sent), durable=False)


class WandbSink:
    """The run at W&B of one process that runs by itself."""

    def __init__(self, settings: WandbSettings, paths: RunPaths, process: str) -> None:
        self._run = WandbRun(settings, paths, process)
        self._process = process

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.update(self._process, {"step": float(step), **values})

    def close(self) -> None:
        self._run.close()


def _row(record: RolloutRecord) -> list[Any]:
    """Make one line of the table: what the first agent was told, and what it said."""
    episode = record.episode
    nodes = episode.traces[0].nodes if episode.traces else []
    told = [node.message.content for node in nodes if not node.sampled and node.message is not None]
    said = [node.message.content for node in nodes if node.sampled and node.message is not None]
    texts = ("\n\n".join(parts)[:LONGEST_TEXT] for parts in (told, said))
    return [record.step, record.env, episode.task.id, record.reward, *texts]
