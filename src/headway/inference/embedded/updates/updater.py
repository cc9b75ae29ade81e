"""Weight updates: received beside the serving weights, then switched to between two steps, or refused."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.config.shared import LoraSettings, TlsSettings
from headway.core.protocol import WeightUpdate
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.updates.probe import check_probe
from headway.inference.errors import UpdateError
from headway.models.adapters.peft import adapter_settings
from headway.models.checkpoints.tensors import load_hf_tensors
from headway.models.serving import StandbyWeights
from headway.transport.weights import make_receiver


@dataclass(slots=True)
class StagedUpdate:
    """A complete, verified version that waits for the switch. `adapter` holds an adapter's tensors, `copies` the same
    in host memory."""

    update: WeightUpdate
    bytes: int
    adapter: dict[str, Tensor] | None = None
    copies: dict[str, Tensor] | None = None


class SideStream:
    """A CUDA stream for work beside the engine's steps, so that neither waits for the other.

    A context for one thread at a time that synchronizes at its end. Does nothing on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch has no types
        self._inside: torch.cuda.StreamContext | None = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._inside = torch.cuda.stream(self._stream)
            self._inside.__enter__()  # type: ignore[no-untyped-call]  # nor here

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._stream is not None and self._inside is not None:
            self._stream.synchronize()
            self._inside.__exit__(kind, error, at)

    def wait_for_current(self) -> None:
        """Make the side stream wait for all work queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))


class Updater:
    """Receives weights into spare buffers, from which the live ones are then replaced.

    The buffers stay for the next update, so that serving neither allocates nor frees weights. `lora` gives the scale of
    adapters whose update names none, `tls` what this host encrypts with.
    """

    def __init__(
        self, engine: EmbeddedEngine, lora: LoraSettings | None = None, tls: TlsSettings | None = None
    ) -> None:
        self._engine = engine
        self._lora = lora
        self._standby: StandbyWeights | None = None
        self._receiver = make_receiver(str(engine.runner.device), tls)
        self._side = SideStream(engine.runner.device)

    def stage(self, update: WeightUpdate) -> StagedUpdate:
        """Fetch and verify a version without touching the serving weights. Raise UpdateError if it is wrong."""
        with self._side:
            return self._stage(update)

    def switch(self, staged: StagedUpdate) -> None:
        """Serve the staged version; called between two steps. On UpdateError nothing has changed."""
        update = staged.update
        if update.adapter is None:
            self._standby_weights().activate()
            self._side.wait_for_current()
            self._engine.weights_changed(update.version, update.fingerprint)
            return
        assert staged.adapter is not None
        try:
            settings = adapter_settings(staged.adapter, update.transport, self._lora)
            self._check_rank(settings)
            in_use = self._engine.adapters_in_use()
            self._engine.adapters.load(update, staged.adapter, settings, copies=staged.copies, in_use=in_use)
        except HeadwayError as error:
            raise UpdateError(f"adapter {update.adapter}, version {update.version}, was refused: {error}") from None
        self._engine.adapter_changed(update.adapter)

    def close(self) -> None:
        self._receiver.close()

    def _stage(self, update: WeightUpdate) -> StagedUpdate:
        staged = StagedUpdate(update, 0)
        try:
            if update.adapter is None:
                standby = self._standby_weights()
                targets = standby.targets
                places = {name: target.view for name, target in targets.items()}
                load_hf_tensors(standby.model, self._receive(staged, places), targets)
                if update.probe is not None:
                    check_probe(standby.model, update.probe)
            else:
                staged.adapter = {name: tensor.clone() for name, tensor in self._receive(staged)}
                staged.copies = {name: tensor.cpu() for name, tensor in staged.adapter.items()}
        except HeadwayError as error:
            raise UpdateError(f"version {update.version} was refused: {error}") from None
        return staged

    def _check_rank(self, settings: LoraSettings) -> None:
        """Refuse an adapter above the rank that the server was started with: all slots of the bank would grow."""
        if self._lora is not None and settings.rank > self._lora.rank:
            raise HeadwayError(
                f"its rank, {settings.rank}, is above this server's; start that with --model.lora.rank {settings.rank}"
            )

    def _receive(self, staged: StagedUpdate, into: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._receiver.receive(staged.update, into):
            staged.bytes += tensor.numel() * tensor.element_size()
            yield name, tensor

    def _standby_weights(self) -> StandbyWeights:
        if self._standby is None:
            self._standby = StandbyWeights(self._engine.model)
        return self._standby
