"""The trainer process of an RL run that is a tenant: it reads the run's batches, and lets a host train them."""

import logging
from contextlib import closing

from safetensors.torch import load
from torch import Tensor

from headway.config.trainer import TrainSettings
from headway.core.runs import RunPaths
from headway.trainer.feed import RolloutFeed
from headway.trainer.parallel.ranks import joined
from headway.trainer.publisher import POLICY
from headway.trainer.recorder import Stopwatch
from headway.trainer.stop import StopRequest
from headway.trainer.tenants.stay import Stay, keep_joined, on_cpu
from headway.transport.control.folder import FolderControl
from headway.transport.rollouts import make_receiver
from headway.transport.tenants.tenancy import Tenancy
from headway.transport.weights.host import HostSender

logger = logging.getLogger(__name__)


def train_at_host(settings: TrainSettings, paths: RunPaths, tenancy: Tenancy) -> bool:
    """Train to `max_steps` (True), or until asked to stop, at the host that the run joined."""
    control = FolderControl(paths)
    with joined(on_cpu(settings)) as ranks, StopRequest(control) as stop:

        def work(stay: Stay) -> bool:
            publisher = _AdapterPublisher(settings, paths, stay)
            publisher.publish()
            receiver = make_receiver(settings.rollouts, paths, 0, 1, control)
            with closing(RolloutFeed([receiver], ranks, stop, publisher.wait)) as feed:
                while not stay.finished:
                    watch = Stopwatch()
                    batch = feed.next(stay.step + 1)
                    if batch is None:
                        logger.info("asked to stop after step %d", stay.step)
                        break
                    waited = watch.lap()
                    metrics = stay.train(batch) | publisher.publish()
                    stay.record(metrics | {"wait_seconds": waited, "step_seconds": watch.lap()})
            stay.save()
            if stay.finished:
                stay.export()
            return stay.finished

        return keep_joined(lambda: Stay(settings, paths, tenancy, ranks, stop), work)


class _AdapterPublisher:
    """Announces every version of the run's adapter to its orchestrator; engines fetch it from the host."""

    def __init__(self, settings: TrainSettings, paths: RunPaths, stay: Stay) -> None:
        assert settings.model.lora is not None
        self._alpha, self._stay = settings.model.lora.alpha, stay
        self._sender = HostSender(paths, POLICY)
        self._adapter: dict[str, Tensor] = {}

    def publish(self) -> dict[str, float]:
        """Announce the adapter of this step. Returns metrics."""
        watch, data = Stopwatch(), self._stay.adapter()
        self._adapter = load(data)
        self._announce()
        return {"publish_seconds": watch.lap(), "publish_bytes": float(len(data))}

    def wait(self) -> None:
        """While no batch comes: tell the host that this run is alive, and keep the adapter announced."""
        self._stay.beat()
        if self._sender.lost():
            logger.warning("version %d was removed from disk and is announced again", self._stay.step)
            self._announce()

    def _announce(self) -> None:
        self._sender.publish(self._stay.step, self._adapter.items(), adapter=POLICY, alpha=self._alpha)
