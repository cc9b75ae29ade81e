"""A trainer of several LoRA runs at once, over one frozen model."""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from headway.base.devices import resolve_device, resolve_dtype
from headway.base.errors import UsageError
from headway.config.trainer import TrainSettings
from headway.core.batches import MicroBatch
from headway.models.costs import StepFlops
from headway.trainer.losses.components import total_loss
from headway.trainer.policy import score_tokens
from headway.trainer.tenants.base import build_base
from headway.trainer.tenants.checkpoints import load_tenant, save_tenant
from headway.trainer.tenants.passes import TenantBlock, choose_micro_batches, join_tokens
from headway.trainer.tenants.tenant import Tenant, TenantError, TenantLimits, TenantReport, WaitingBatch
from headway.transport.rollouts import RankBatch

logger = logging.getLogger(__name__)

_SAME = ("path", "family", "implementation", "dtype", "compute")
"""Settings of the model that a tenant has in common with the trainer."""


class TenantTrainer:
    """Trains tenants that join and leave at any time. One thread calls it.

        trainer = TenantTrainer(settings)
        trainer.join("anna", anna_settings)
        trainer.submit("anna", batch)
        for report in trainer.run_pass(): ...

    Micro-batches of all tenants share forward and backward passes of up to `seq_len` tokens. A tenant's step is taken
    as soon as all micro-batches of its batch are trained, whatever the others do.
    """

    def __init__(
        self, settings: TrainSettings, *, apart: bool | None = None, limits: TenantLimits | None = None
    ) -> None:
        """`apart` keeps tenants' arithmetic apart, too: each then gets the numbers of a run by itself, bit for bit.

        Default: on a CPU. Otherwise the model's own products are over the rows of all tenants at once, which is faster
        and equal up to rounding.
        """
        self._settings, self._limits = settings, limits or TenantLimits()
        self._device = torch.device(resolve_device(settings.placement.device, torch.cuda.is_available()))
        self._apart = self._device.type == "cpu" if apart is None else apart
        self._model, self._folder = build_base(settings, self._device)
        self._flops = StepFlops(self._model.config, frozen=True)
        self._tenants: dict[str, Tenant] = {}
        self._suspects: list[str] = []
        """Tenants whose batches are trained alone: a pass failed that had blocks of all of them."""

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        """The tenants by name."""
        return MappingProxyType(self._tenants)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> str:
        """The precision of computation, by torch's name."""
        return resolve_dtype(self._settings.model.dtype, self._device.type)

    def join(
        self,
        name: str,
        settings: TrainSettings,
        checkpoint: Path | None = None,
        *,
        weight: float = 1.0,
        replace: bool = False,
    ) -> Tenant:
        """Add a tenant, with a fresh adapter or from a checkpoint. Raises TenantError if it cannot be taken in, and
        UsageError or DamagedError if the checkpoint does not fit or cannot be read.

        Of the passes it gets a share by its `weight`, whenever it has a batch. With `replace` it may take the place of
        an earlier self, which stays where the new one is refused.
        """
        if name in self._tenants and not replace:
            raise TenantError(name, "has joined already; choose another name")
        self._check_tenant(name, settings)
        try:
            tenant = Tenant(name, settings, self._model, weight)
        except UsageError as error:
            raise TenantError(name, str(error)) from error
        if checkpoint is not None:
            load_tenant(tenant, self._model, checkpoint)
        taken = sum(other.memory for other in self._tenants.values() if other.name != name)
        if taken + tenant.memory > self._limits.adapter_bytes:
            raise TenantError(
                name,
                f"its adapter and optimizer take {tenant.memory / 2**20:.0f} MiB, and "
                f"{max(0, self._limits.adapter_bytes - taken) / 2**20:.0f} MiB are free here; lower model.lora.rank",
            )
        self._tenants[name] = tenant
        logger.info('tenant "%s" joined at step %d, rank %d', name, tenant.step, tenant.adapter.settings.rank)
        return tenant

    def leave(self, name: str) -> None:
        """Remove a tenant with its batches. Save it before, if it is to come back."""
        self._get(name)
        del self._tenants[name]
        self._suspects = [other for other in self._suspects if other != name]
        logger.info('tenant "%s" left', name)

    def save(self, name: str, folder: Path) -> None:
        """Write the tenant's checkpoint, with which it can join here or elsewhere. Batches that wait are not in it."""
        save_tenant(self._get(name), self._model, folder, str(self._folder))

    def submit(self, name: str, batch: RankBatch) -> None:
        """Take the next batch of a tenant. Raises TenantError, with nothing changed but a count, if it is refused."""
        self._add(name, WaitingBatch(batch))

    def evaluate(self, name: str, batch: RankBatch) -> None:
        """Take a batch of which the losses are wanted, after the tenant's step of its number, and no gradients. It
        waits, has its share of passes, and may be refused, as those do that are trained."""
        self._add(name, WaitingBatch(batch, evaluation=True))

    def _add(self, name: str, waiting: WaitingBatch) -> None:
        tenant = self._get(name)
        if not tenant.waiting:  # who had nothing to train has saved up nothing
            busy = [other.served for other in self._tenants.values() if other.ready]
            tenant.served = max([tenant.served, *([min(busy)] if busy else [])])
        tenant.add(waiting, self._model.config, self._settings.seq_len, self._limits)

    def run_pass(self) -> list[TenantReport]:
        """Run one pass over micro-batches of all tenants, and take the steps of those whose batch is complete."""
        tenants = [self._tenants[name] for name in self._next_suspects() or self._tenants]
        chosen = choose_micro_batches(tenants, self._settings.seq_len, self._limits.floor)
        if not chosen:
            return []
        started = time.perf_counter()
        _note_waits(chosen, started)
        took_part = {tenant.name: tenant for tenant, _, _ in chosen}
        try:
            blocks = [TenantBlock.make(*one, self._model.config, self._device) for one in chosen]
            reports = self._evaluate([block for block in blocks if block.batch.evaluation])
            reports += self._train([block for block in blocks if not block.batch.evaluation])
        except Exception as error:
            return self._suspect(list(took_part.values()), error)
        begun = [_guarded_step(tenant) for tenant in took_part.values() if tenant.complete]
        reports += [end() for end in begun]
        total, seconds = sum(sum(micro.lengths) for _, _, micro in chosen), time.perf_counter() - started
        for tenant, _, micro in chosen:
            tenant.seconds += seconds * sum(micro.lengths) / total
        return reports

    def _next_suspects(self) -> list[str]:
        """Return the one tenant that is to be trained alone, if there is one. It is cleared with its batch."""
        self._suspects = [name for name in self._suspects if self._tenants[name].ready]
        return self._suspects[:1]

    def _suspect(self, tenants: Sequence[Tenant], error: Exception) -> list[TenantReport]:
        """A pass failed: begin the batches in it again, each alone, until the one that fails is known and stopped."""
        for tenant in tenants:
            tenant.restart_batch()
        if len(tenants) == 1:
            return [_stopped(tenants[0], f"training its batch failed: {type(error).__name__}: {error}")]
        self._suspects = [tenant.name for tenant in tenants]
        logger.warning("a pass failed (%s); trained alone from here: %s", error, ", ".join(self._suspects))
        return []

    def run(self) -> list[TenantReport]:
        """Run passes until no batch waits. Returns the reports of all steps."""
        reports = list[TenantReport]()
        while any(tenant.ready for tenant in self._tenants.values()):
            reports += self.run_pass()
        return reports

    def _train(self, blocks: Sequence[TenantBlock]) -> list[TenantReport]:
        """Compute the gradients of a pass, and add them up by tenant. Returns reports of tenants whose loss failed."""
        if not blocks:
            return []
        hidden_TD = self._model(join_tokens(blocks, self._device, apart=self._apart)).hidden_TD
        parts = torch.split(hidden_TD.detach(), [block.use.block.rows for block in blocks])
        grads, failed = list[Tensor](), list[TenantReport]()
        for block, part_TD in zip(blocks, parts, strict=True):
            if block.tenant.stopped is None:
                # By itself, up to the model's output: a loss may be the tenant's own code, and fail.
                part_TD.requires_grad_()
                try:
                    torch.autograd.backward(self._loss(block, part_TD))
                except Exception as error:
                    failed.append(_stopped(block.tenant, f"its loss failed: {type(error).__name__}: {error}"))
            grads.append(torch.zeros_like(part_TD) if part_TD.grad is None else part_TD.grad)
        torch.autograd.backward(hidden_TD, torch.cat(grads))
        for block in blocks:
            if block.tenant.stopped is None:
                block.tenant.adapter.add_gradients(block.use)
                block.batch.done += 1
        return failed

    @torch.no_grad()
    def _evaluate(self, blocks: Sequence[TenantBlock]) -> list[TenantReport]:
        """Compute the losses of a pass without gradients. Returns reports of tenants whose loss failed."""
        if not blocks:
            return []
        hidden_TD = self._model(join_tokens(blocks, self._device, apart=self._apart)).hidden_TD
        failed = list[TenantReport]()
        for block, part_TD in zip(
            blocks, torch.split(hidden_TD, [block.use.block.rows for block in blocks]), strict=True
        ):
            if block.tenant.stopped is None:
                try:
                    self._loss(block, part_TD)
                    block.batch.done += 1
                except Exception as error:
                    failed.append(_stopped(block.tenant, f"its loss failed: {type(error).__name__}: {error}"))
        return failed

    def _loss(self, block: TenantBlock, hidden_TD: Tensor) -> Tensor:
        trainer, inputs, sums = block.tenant.settings.trainer, block.inputs, block.batch.sums
        logprobs_N, entropy_N = score_tokens(
            *(self._model, hidden_TD, inputs.scored, self._settings.trainer.head_chunk),
            entropy_gradient=trainer.entropy_coef > 0,
        )
        counts = block.batch.batch.counts
        loss, values = total_loss(
            logprobs_N, entropy_N, inputs.scored.loss, counts, block.tenant.loss, trainer.entropy_coef
        )
        sums.add(values)
        sums.logprobs.append(logprobs_N.detach())
        sums.real_tokens += inputs.real_tokens
        sums.packed_tokens += sum(inputs.lengths)
        sums.flops += self._flops.count(inputs.lengths, len(inputs.scored.loss.sampled_N))
        return loss

    def _get(self, name: str) -> Tenant:
        if name not in self._tenants:
            raise TenantError(name, f"is not here; tenants are: {', '.join(self._tenants) or 'none'}")
        return self._tenants[name]

    def _check_tenant(self, name: str, settings: TrainSettings) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", name):
            raise TenantError(name, "the name must be of letters, digits, '.', '_' and '-', at most 64")
        others = len(self._tenants.keys() - {name})
        if others >= self._limits.tenants:
            raise TenantError(name, f"there are {others} tenants, and no place for more")
        lora = settings.model.lora
        if lora is None:
            raise TenantError(name, "model.lora is missing: tenants train an adapter")
        if lora.rank > self._limits.rank:
            raise TenantError(name, f"model.lora.rank must be at most {self._limits.rank} here (got {lora.rank})")
        for key in _SAME:
            ours, theirs = getattr(self._settings.model, key), getattr(settings.model, key)
            if ours != theirs:
                raise TenantError(name, f"model.{key} must be that of the trainer, {ours!r} (got {theirs!r})")


def _note_waits(chosen: Sequence[tuple[Tenant, WaitingBatch, MicroBatch]], now: float) -> None:
    """Count how long the batches waited that begin with this pass."""
    for tenant, batch, _ in chosen:
        if batch.queued is None:
            batch.queued = now - batch.since
            tenant.queue_seconds += batch.queued


def _guarded_step(tenant: Tenant) -> Callable[[], TenantReport]:
    """Begin a tenant's step; the result ends it. An optimizer or a schedule may be the tenant's own code, and fail."""

    def failed(error: Exception) -> TenantReport:
        return _stopped(tenant, f"its step failed: {type(error).__name__}: {error}")

    def end() -> TenantReport:
        try:
            return ended()
        except Exception as error:
            return failed(error)

    try:
        ended = tenant.begin_evaluation() if tenant.waiting[0].evaluation else tenant.begin_step()
    except Exception as error:
        report = failed(error)
        return lambda: report
    return end


def _stopped(tenant: Tenant, reason: str) -> TenantReport:
    tenant.stop(reason)
    logger.warning('tenant "%s" is stopped: %s', tenant.name, reason)
    return TenantReport(tenant.name, tenant.step, {"refused": float(tenant.refused)}, skipped=True, error=reason)
