"""Supervised fine-tuning: rows are tokenized once, packed for every step, and validated on held-out ones."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headway.base.errors import HeadwayError, UsageError
from headway.base.files import write_atomic
from headway.config.sft import SftSettings
from headway.core.batches import ComponentCounts, MicroBatch
from headway.core.image_files import ImageFiles
from headway.core.images import LoadImage
from headway.core.rows import read_rows
from headway.core.runs import RunPaths
from headway.models.images.reader import file_reader
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.monitor.progress import progress, progress_bar
from headway.rendering.load import load_renderer
from headway.trainer.data.order import Indices, RowOrder
from headway.trainer.data.packing import counts_of, micro_batches
from headway.trainer.data.rows import TokenRows, tokenize_rows
from headway.trainer.loop import TrainingLoop
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.step import StepReport
from headway.trainer.stop import StopRequest
from headway.transport.control.folder import FolderControl
from headway.transport.rollouts import RankBatch

logger = logging.getLogger(__name__)

LOGGED_STEPS = 20
"""Steps of a run that are logged. One takes a fraction of a second: the progress bar and these say enough."""


def sft(settings: SftSettings, paths: RunPaths) -> Path:
    """Train to `max_steps` from the newest complete checkpoint, or until asked to stop. Runs in every rank.

    Either way a checkpoint and a Hugging Face export are left at the end; returns the export's folder.
    """
    with joined(settings) as ranks, StopRequest(FolderControl(paths)) as stop, ExitStack() as stack:
        rows = shared_rows(settings, paths, ranks, settings.data.path, "train")
        packer = RowPacker(settings, paths, ranks, rows)
        validation = load_validation(settings, paths, ranks)
        loop = TrainingLoop(settings, paths, ranks, stack, log_interval(settings))
        feed = RowFeed(settings, packer, ranks, stop, first_step=loop.state.step + 1)
        advance = stack.enter_context(progress_bar("fine-tuning", settings.max_steps))
        advance(loop.state.step)

        def after_step(batch: RankBatch, report: StepReport) -> dict[str, float]:
            advance(1)
            due = loop.state.step % settings.validation_interval == 0 or loop.finished
            if validation is None or not due:
                return batch.metrics
            metrics = loop.stepper.evaluate(loop.state, validation.micro_batches(), validation.counts)
            return batch.metrics | {"validation/loss": metrics["loss"]}

        loop.run(feed, after_step)
        folder = loop.export()
        loop.checkpoints.wait()
        return folder


def log_interval(settings: SftSettings) -> int:
    return max(1, settings.max_steps // LOGGED_STEPS)


class RowPacker:
    """Packs rows into this rank's micro-batches. Images, which `shared_rows` stored, are read as they are needed."""

    def __init__(self, settings: SftSettings, paths: RunPaths, ranks: Ranks, rows: TokenRows) -> None:
        self.rows, self._seq_len, self._ranks = rows, settings.seq_len, ranks
        self._load_image: LoadImage | None = None
        if rows.images:
            folder = resolve_model(settings.model.path, settings.model.family)
            self._load_image = file_reader(ImageFiles(paths.images), folder)

    def pack(self, chosen: Indices) -> Iterator[MicroBatch]:
        ranks = self._ranks
        return micro_batches(self.rows, chosen, self._seq_len, ranks.data_rank, ranks.data_size, self._load_image)


class RowFeed:
    """Batches of the rows that each step trains."""

    def __init__(
        self, settings: SftSettings, packer: RowPacker, ranks: Ranks, stop: StopRequest, first_step: int
    ) -> None:
        self._packer, self._ranks, self._stop = packer, ranks, stop
        shuffle = settings.data.shuffle
        self._order = RowOrder(packer.rows.lengths, settings.batch_tokens, seed=settings.seed, shuffle=shuffle)
        self._order.skip(first_step - 1)

    def next(self, step: int) -> RankBatch | None:
        if self._ranks.any(self._stop.asked):
            return None
        chosen = self._order.next()
        metrics = {"epoch": self._order.progress, "rows": float(len(chosen))}
        counts = counts_of(self._packer.rows, chosen)
        return RankBatch(step, list(self._packer.pack(chosen)), counts, metrics=metrics)

    def close(self) -> None: ...


@dataclass(frozen=True)
class Validation:
    """Held-out rows, and the tokens of them that count over all ranks."""

    packer: RowPacker
    counts: ComponentCounts

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Pack them for this rank, one micro-batch at a time: images of all would take much memory."""
        return self.packer.pack(np.arange(len(self.packer.rows)))


def load_validation(settings: SftSettings, paths: RunPaths, ranks: Ranks) -> Validation | None:
    path = settings.data.validation_path
    if path is None:
        return None
    rows = shared_rows(settings, paths, ranks, str(path), "validation")
    return Validation(RowPacker(settings, paths, ranks, rows), counts_of(rows, np.arange(len(rows))))


def shared_rows(settings: SftSettings, paths: RunPaths, ranks: Ranks, path: str, name: str) -> TokenRows:
    """Tokenize rows in the first rank and read them in all. Raises HeadwayError if the run began with others."""
    file = paths.root / "data" / f"{name}.rows"
    failure: HeadwayError | None = None
    if ranks.is_main:
        try:
            rows = _tokenize(settings, paths, path, name)
            _check_unchanged(rows, paths, name, path)
            rows.save(file)
        except HeadwayError as error:
            failure = error
    if ranks.any(failure is not None):
        raise failure or HeadwayError("the first rank could not read the data; see its log output")
    return TokenRows.load(file)


def _tokenize(settings: SftSettings, paths: RunPaths, path: str, name: str) -> TokenRows:
    data = settings.data
    folder = resolve_model(settings.model.path, settings.model.family)
    longest = load_config(folder, settings.model.implementation).max_len
    if settings.seq_len > longest:
        raise UsageError(f"seq_len is {settings.seq_len}, but the model's positions end at {longest}")
    rows, skipped = tokenize_rows(
        progress(read_rows(path, data.split), f"reading {name} rows"),
        load_renderer(folder, settings.model.renderer, settings.model.family),
        seq_len=settings.seq_len,
        train_roles=data.train_roles,
        too_long=data.too_long,
        max_bad_rows=data.max_bad_rows,
        images=ImageFiles(paths.images),
    )
    logger.info(
        "%s: %d rows of %d tokens, %d of them learned; %d bad, %d truncated, %d dropped",
        name, len(rows), len(rows.token_ids), rows.learned.sum(), len(skipped.bad), skipped.truncated, skipped.dropped,
    )  # fmt: skip
    if not len(rows):
        raise HeadwayError(f"{path}: holds no row to learn from")
    return rows


def _check_unchanged(rows: TokenRows, paths: RunPaths, name: str, path: str) -> None:
    """Raise HeadwayError for other rows than before: their order is a function of the step only while they stay."""
    record = paths.root / "data" / f"{name}.digest"
    if record.is_file() and record.read_text() != rows.digest:
        raise HeadwayError(f"{path}: its rows are not those that this run began with; start a new run")
    write_atomic(record, rows.digest)
