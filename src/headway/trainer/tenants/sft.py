"""Supervised fine-tuning at a host: the run tokenizes and packs its rows, and the host trains its adapter on them."""

from contextlib import ExitStack

from headway.base.errors import UsageError
from headway.config.sft import SftSettings
from headway.core.runs import RunPaths
from headway.monitor.progress import progress_bar
from headway.trainer.parallel.ranks import joined
from headway.trainer.recorder import Stopwatch
from headway.trainer.sft import RowFeed, RowPacker, load_validation, log_interval, shared_rows
from headway.trainer.stop import StopRequest
from headway.trainer.tenants.stay import Stay, keep_joined, on_cpu
from headway.transport.control.folder import FolderControl
from headway.transport.rollouts import RankBatch
from headway.transport.tenants.tenancy import Tenancy


def sft_at_host(settings: SftSettings, paths: RunPaths, tenancy: Tenancy) -> bool:
    """Train to `max_steps` (True), or until asked to stop, at the host that the run joined. Either way a checkpoint and
    an export of the adapter are left at the end."""
    with joined(on_cpu(settings)) as ranks, StopRequest(FolderControl(paths)) as stop, ExitStack() as stack:
        rows = shared_rows(settings, paths, ranks, settings.data.path, "train")
        if rows.images:
            raise UsageError(f"{settings.data.path}: tenants cannot train on images yet; run it without --host")
        packer = RowPacker(settings, paths, ranks, rows)
        validation = load_validation(settings, paths, ranks)
        advance = stack.enter_context(progress_bar("fine-tuning", settings.max_steps))

        def work(stay: Stay) -> bool:
            advance(stay.step)
            feed = RowFeed(settings, packer, ranks, stop, first_step=stay.step + 1)
            while not stay.finished:
                watch = Stopwatch()
                if (batch := feed.next(stay.step + 1)) is None:
                    break
                waited = watch.lap()
                metrics = stay.train(batch) | batch.metrics
                if validation and (stay.step % settings.validation_interval == 0 or stay.finished):
                    held_out = RankBatch(stay.step, list(validation.micro_batches()), validation.counts)
                    metrics["validation/loss"] = stay.evaluate(held_out)["loss"]
                stay.record(metrics | {"wait_seconds": waited, "step_seconds": watch.lap()})
                advance(1)
            stay.save()
            stay.export()
            return stay.finished

        interval = log_interval(settings)
        return keep_joined(lambda: Stay(settings, paths, tenancy, ranks, stop, interval), work)
