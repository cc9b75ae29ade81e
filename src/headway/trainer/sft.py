"""Supervised fine-tuning: tokenize once, then pack, step, validate, checkpoint; export at the end."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headway.config.sft import SftSettings
from headway.core.batches import ComponentCounts, MicroBatch
from headway.core.errors import HeadwayError, UsageError
from headway.core.files import write_atomic
from headway.core.runs import RunPaths
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.monitor.progress import progress, progress_bar
from headway.rendering.load import load_renderer
from headway.trainer.checkpoints import Checkpoints
from headway.trainer.data.order import RowOrder
from headway.trainer.data.packing import counts_of, micro_batches
from headway.trainer.data.rows import TokenRows, tokenize_rows
from headway.trainer.data.sources import read_rows
from headway.trainer.exports import export
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.recorder import Recorder, Stopwatch
from headway.trainer.state import build_state
from headway.trainer.step import Stepper
from headway.trainer.stop import StopRequest
from headway.transport.rollouts import RankBatch

_log = logging.getLogger("headway.sft")
_REPORTS = 20
"""Lines about progress that a run writes to the log."""


def sft(settings: SftSettings, paths: RunPaths) -> Path:
    """Train to `max_steps` from the newest complete checkpoint, or until asked to stop. Runs in every rank.

    Either way a checkpoint and a Hugging Face export are left at the end; returns the export's folder.
    """
    with joined(settings) as ranks, StopRequest(paths) as stop, ExitStack() as stack:
        return _FineTuning(settings, paths, ranks, stop, stack).run()


@dataclass(frozen=True)
class Validation:
    """Held-out rows, packed once: this rank's micro-batches and the tokens that count over all ranks."""

    micro_batches: list[MicroBatch]
    counts: ComponentCounts


class _FineTuning:
    def __init__(
        self, settings: SftSettings, paths: RunPaths, ranks: Ranks, stop: StopRequest, stack: ExitStack
    ) -> None:
        self.settings, self.paths, self.ranks, self.stop = settings, paths, ranks, stop
        self.rows = shared_rows(settings, paths, ranks, settings.data.path, "train")
        self.validation = self._validation()
        self.state = build_state(settings, ranks)
        self.checkpoints = stack.enter_context(closing(Checkpoints(settings, paths, ranks)))
        if self.checkpoints.restore(self.state):
            _log.info("resumed from the checkpoint of step %d", self.state.step)
        self.order = RowOrder(
            self.rows.lengths, settings.batch_tokens, seed=settings.seed, shuffle=settings.data.shuffle
        )
        self.order.skip(self.state.step)
        self.stepper = Stepper(settings, ranks)
        self.recorder = stack.enter_context(
            closing(Recorder(paths, ranks, self.state.step, settings.max_steps, settings.tracking))
        )

    def run(self) -> Path:
        with _few_lines(), progress_bar("fine-tuning", self.settings.max_steps) as advance:
            advance(self.state.step)
            while self.state.step < self.settings.max_steps:
                if self.ranks.any(self.stop.asked):
                    _log.info("asked to stop after step %d", self.state.step)
                    break
                self.step()
                advance(1)
        self.checkpoints.save(self.state)
        folder = export(self.state, self.paths, self.ranks)
        _log.info("exported to %s", folder)
        self.checkpoints.wait()
        return folder

    def step(self) -> None:
        watch = Stopwatch()
        batch = self.next_batch()
        report = self.stepper.step(self.state, batch)
        self.refuse_bad_steps()
        metrics = report.metrics | {"epoch": self.order.progress, "rows": batch.metrics["rows"]} | self.validate()
        self.checkpoint_if_due()
        metrics["step_seconds"] = watch.lap()
        self.recorder.record(self.state.step, metrics, report.expert_load_LE)
        self.report(metrics)

    def next_batch(self) -> RankBatch:
        chosen = self.order.next()
        micro = micro_batches(self.rows, chosen, self.settings.seq_len, self.ranks.data_rank, self.ranks.data_size)
        return RankBatch(self.state.step + 1, micro, counts_of(self.rows, chosen), metrics={"rows": float(len(chosen))})

    def validate(self) -> dict[str, float]:
        """The loss on held-out rows, where there are any and it is time."""
        step, settings = self.state.step, self.settings
        if self.validation is None or (step % settings.validation_interval and step != settings.max_steps):
            return {}
        metrics = self.stepper.evaluate(self.state, self.validation.micro_batches, self.validation.counts)
        return {"validation/loss": metrics["loss"]}

    def checkpoint_if_due(self) -> None:
        due = self.settings.trainer.checkpoints
        if self.state.step % due.interval == 0:
            self.checkpoints.save(self.state)
        if due.export_interval and self.state.step % due.export_interval == 0:
            export(self.state, self.paths, self.ranks)

    def report(self, metrics: dict[str, float]) -> None:
        step, last = self.state.step, self.settings.max_steps
        if step % max(1, last // _REPORTS) and step != last and "validation/loss" not in metrics:
            return
        held_out = f"  validation {metrics['validation/loss']:.4g}" if "validation/loss" in metrics else ""
        speed = metrics["tokens"] / metrics["step_seconds"]
        _log.info("step %d/%d  loss %.4g%s  %.0f tok/s", step, last, metrics["loss"], held_out, speed)

    def refuse_bad_steps(self) -> None:
        if self.state.bad_steps:
            _log.warning("step %d skipped: its loss or gradients were not finite", self.state.step)
        if self.state.bad_steps >= self.settings.trainer.max_bad_steps:
            raise HeadwayError(
                f"the loss or gradients of {self.state.bad_steps} steps in a row were not finite, the last at step "
                f"{self.state.step}; lower trainer.optim.lr"
            )

    def _validation(self) -> Validation | None:
        path = self.settings.data.validation_path
        if path is None:
            return None
        rows = shared_rows(self.settings, self.paths, self.ranks, str(path), "validation")
        every = np.arange(len(rows))
        micro = micro_batches(rows, every, self.settings.seq_len, self.ranks.data_rank, self.ranks.data_size)
        return Validation(micro, counts_of(rows, every))


@contextmanager
def _few_lines() -> Iterator[None]:
    """A step takes a fraction of a second here: the bar and a line now and then say enough."""
    trainer = logging.getLogger("headway.trainer")
    level = trainer.level
    trainer.setLevel(logging.WARNING)
    try:
        yield
    finally:
        trainer.setLevel(level)


def shared_rows(settings: SftSettings, paths: RunPaths, ranks: Ranks, path: str, name: str) -> TokenRows:
    """Rows that rank 0 tokenizes and the others read. Raises HeadwayError when they aren't those the run began with."""
    file = paths.root / "data" / f"{name}.rows"
    failure: HeadwayError | None = None
    if ranks.is_main:
        try:
            rows = _tokenize(settings, path, name)
            _refuse_changed(rows, paths, name, path)
            rows.save(file)
        except HeadwayError as error:
            failure = error
    if ranks.any(failure is not None):
        raise failure or HeadwayError("rank 0 could not read the data")
    return TokenRows.load(file)


def _tokenize(settings: SftSettings, path: str, name: str) -> TokenRows:
    data = settings.data
    folder = resolve_model(settings.model.path, settings.model.family)
    longest = load_config(folder).max_len
    if settings.seq_len > longest:
        raise UsageError(f"seq_len is {settings.seq_len}, but the model's positions end at {longest}")
    rows, refused = tokenize_rows(
        progress(read_rows(path, data.split), f"reading {name} rows"),
        load_renderer(folder, settings.model.renderer),
        seq_len=settings.seq_len,
        train_roles=data.train_roles,
        too_long=data.too_long,
        max_bad_rows=data.max_bad_rows,
    )
    _log.info(
        "%s: %d rows of %d tokens, %d of them learned; %d broken, %d truncated, %d dropped",
        name, len(rows), len(rows.token_ids), rows.learned.sum(), len(refused.bad), refused.truncated, refused.dropped,
    )  # fmt: skip
    if not len(rows):
        raise HeadwayError(f"{path}: holds no row to learn from")
    return rows


def _refuse_changed(rows: TokenRows, paths: RunPaths, name: str, path: str) -> None:
    """The order of rows is a function of the step only as long as the rows stay the same."""
    record = paths.root / "data" / f"{name}.digest"
    if record.is_file() and record.read_text() != rows.digest:
        raise HeadwayError(f"{path}: its rows are not those that this run began with; start a new run")
    write_atomic(record, rows.digest)
