"""The host's loop: trains the tenants' batches, and does between two passes what the service asks for."""

import logging
import queue
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save

from headway.base.errors import HeadwayError
from headway.config.host import HostSettings
from headway.core.tenants import (
    HostStatus,
    StepOutcome,
    TenantGrant,
    TenantJoin,
    TenantJoined,
    TenantStatus,
    token_hash,
)
from headway.trainer.tenants.folder import TenantFolder, TenantRecord, known_tenants, read_files
from headway.trainer.tenants.requested import tenant_settings
from headway.trainer.tenants.tenant import Tenant, TenantLimits, TenantReport
from headway.trainer.tenants.trainer import TenantTrainer
from headway.transport.rollouts import RankBatch
from headway.transport.tenants.client import BUSY, GONE
from headway.transport.tenants.service import RefusedRequestError

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 0.05
_KEPT_OUTCOMES = 2
_JOINS, _JOIN_SECONDS = 20, 60.0
"""A tenant joins so often in this time, at most, and so do new names together: each time costs all some of the
trainer's."""
_LOG_SECONDS = 1.0
Result = TypeVar("Result")


@dataclass(slots=True)
class Account:
    """A tenant as the host keeps it, whether it is in the trainer now or was dropped."""

    record: TenantRecord
    folder: TenantFolder
    session: str | None = None
    seen: float = 0.0
    joined: deque[float] = field(default_factory=lambda: deque(maxlen=_JOINS))
    saved: int | None = None
    """The step of the checkpoint on disk, as far as this process knows it."""
    outcomes: dict[int, StepOutcome] = field(default_factory=dict)
    adapters: dict[int, bytes] = field(default_factory=dict)
    evaluations: dict[int, StepOutcome] = field(default_factory=dict)
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    queue_seconds: float = 0.0
    refused: int = 0
    last_refusal: str = ""


class TenantLoop:
    """The tenants of a host, on disk and in the trainer. `run` is one thread's; the rest is the service's.

    A tenant's newest checkpoint and who it is are in `folder`: a host that is started again has them.
    """

    def __init__(
        self,
        settings: HostSettings,
        folder: Path,
        engines: Callable[[], dict[str, str]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        own = settings.host
        limits = TenantLimits(
            own.tenants,
            own.rank,
            batch_tokens=own.batch_tokens,
            adapter_bytes=int(own.adapter_memory_gb * 1e9),
            floor=own.floor,
        )
        self._settings, self._folder, self._engines, self._clock = settings, folder, engines, clock
        self._trainer = TenantTrainer(settings, limits=limits)
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._accounts: dict[str, Account] = {}
        self._newcomers: deque[float] = deque(maxlen=_JOINS)
        self._strangers, self._log_at = 0, 0.0
        self.passes, self.busy_seconds = 0, 0.0
        self.sampled: Callable[[], dict[str, int]] = dict
        """Tells how many tokens the engines have sampled for each tenant."""
        for record, place in known_tenants(folder):
            self._take_up(Account(record, place, seen=clock()))

    def run(self, stop: Callable[[], bool], on_turn: Callable[[], None] = lambda: None) -> None:
        """Train until asked to stop; then write all tenants to disk. `on_turn` is called after every turn."""
        while not stop():
            self.turn()
            on_turn()
        for name in list(self._trainer.tenants):
            self._save(self._accounts[name])

    def turn(self) -> None:
        """Do what was asked for, and then one pass. Waits a moment where there is nothing to do."""
        try:
            self._work.get(block=not self._busy(), timeout=_IDLE_SECONDS)()
            while True:
                self._work.get_nowait()()
        except queue.Empty:
            pass
        self._watch_silence()
        busy, started = self._busy(), time.perf_counter()
        for report in self._trainer.run_pass():
            self._finish(report)
        self._collect_costs()
        if busy:
            self.passes += 1
            self.busy_seconds += time.perf_counter() - started

    def _busy(self) -> bool:
        return any(tenant.ready for tenant in self._trainer.tenants.values())

    def grants(self) -> list[TenantGrant]:
        """Return the tenants as engines have to know them."""
        return [
            TenantGrant(name, account.record.token_sha256, self._weight(name))
            for name, account in sorted(self._accounts.items())
            if not account.record.dropped
        ]

    def token_hash(self, name: str) -> str | None:
        account = self._accounts.get(name)
        return None if account is None else account.record.token_sha256

    def join(self, name: str, request: TenantJoin) -> Future[TenantJoined]:
        return self._do(lambda: self._join(name, request))

    def submit(self, name: str, batch: RankBatch, *, evaluation: bool = False) -> Future[None]:
        return self._do(lambda: self._submit(name, batch, evaluation))

    def outcome(self, name: str, step: int) -> StepOutcome | None:
        return self._account(name).outcomes.get(step)

    def evaluation(self, name: str, step: int) -> StepOutcome | None:
        account, tenant = self._account(name), self._trainer.tenants.get(name)
        if tenant is not None and tenant.stopped is not None:
            return StepOutcome(step, {}, tenant.stopped)
        return account.evaluations.get(step)

    def adapter(self, name: str, step: int) -> bytes | None:
        return self._account(name).adapters.get(step)

    def checkpoint(self, name: str, step: int) -> Future[dict[str, bytes]]:
        return self._do(lambda: self._checkpoint(name, step))

    def leave(self, name: str) -> Future[None]:
        return self._do(lambda: self._leave(name))

    def seen(self, name: str, session: str | None) -> None:
        account = self._account(name)
        if account.session is None or session != account.session:
            raise RefusedRequestError("this session is over: join again, from the newest checkpoint", GONE)
        account.seen = self._clock()

    def refused(self, name: str, reason: str) -> None:
        account = self._accounts.get(name)
        if account is None:
            self._strangers += 1
        else:
            account.refused += 1
            account.last_refusal = reason[:500]
        if time.monotonic() > self._log_at:  # a flood of requests must not become one of logs
            self._log_at = time.monotonic() + _LOG_SECONDS
            logger.warning('refused a request of tenant "%s": %s', name[:40], reason[:500])

    def tenant(self, name: str) -> TenantStatus:
        return self._status(self._account(name), sum(other.seconds for other in self._accounts.values()))

    def status(self) -> HostStatus:
        accounts = [account for _, account in sorted(self._accounts.items())]
        total = sum(account.seconds for account in accounts)
        return HostStatus(
            self._settings.model.path,
            self._engines(),
            self.passes,
            self.busy_seconds,
            [self._status(account, total) for account in accounts],
            self._strangers,
            self._settings.cost.currency if self._hour() else "",
        )

    def _hour(self) -> float:
        """Return the price of an hour of the trainer."""
        prices = self._settings.cost
        on_gpu = self._trainer.device.type == "cuda"
        return prices.gpu_hour if on_gpu else prices.core_hour * torch.get_num_threads()

    def _do(self, work: Callable[[], Result]) -> Future[Result]:
        """Let the training thread do something between two passes."""
        future = Future[Result]()

        def act() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        self._work.put(act)
        return future

    def _account(self, name: str) -> Account:
        if name not in self._accounts:
            raise RefusedRequestError("no such tenant is here: join again", GONE)
        return self._accounts[name]

    def _weight(self, name: str) -> float:
        return self._settings.host.weights.get(name, 1.0)

    def _join(self, name: str, request: TenantJoin) -> TenantJoined:
        """Put a tenant into the trainer, in place of an earlier self. Refused, that one is as it was."""
        settings = tenant_settings(self._settings, request.settings)
        before = self._accounts.get(name)
        if before is not None and before.record.token_sha256 != token_hash(request.token):
            raise RefusedRequestError("another run has this name; choose another with --tenant")
        joined = self._newcomers if before is None else before.joined
        _check_haste(joined)
        joined.append(time.monotonic())
        record = TenantRecord(name, token_hash(request.token), request.settings)
        folder = TenantFolder(self._folder / name)
        sent = None if request.checkpoint is None else folder.receive(request.checkpoint)
        tenant = self._trainer.join(name, settings, sent, weight=self._weight(name), replace=True)
        folder.accept(sent, tenant.step)
        folder.write(record)
        account = before or Account(record, folder)
        account.record, account.session, account.seen = record, secrets.token_hex(8), self._clock()
        account.saved = None
        account.outcomes.clear()
        account.evaluations.clear()
        account.adapters = {tenant.step: self._adapter_bytes(tenant)}
        self._accounts[name] = account
        return TenantJoined(account.session, tenant.step, self._trainer.dtype, self._weight(name))

    def _take_up(self, account: Account) -> None:
        """Continue with a tenant that is on disk, as far as it can be: it joins again with what it has itself."""
        self._accounts[account.record.name] = account
        if account.record.dropped:
            return
        try:
            settings = tenant_settings(self._settings, account.record.settings)
            name = account.record.name
            self._trainer.join(name, settings, account.folder.newest(), weight=self._weight(name))
        except HeadwayError as error:
            logger.warning('tenant "%s" is not taken up from disk: %s', account.record.name, error)

    def _submit(self, name: str, batch: RankBatch, evaluation: bool) -> None:
        account, tenant = self._account(name), self._trained(name)
        known = set(account.evaluations if evaluation else account.outcomes)
        known |= {waiting.batch.step for waiting in tenant.waiting if waiting.evaluation == evaluation}
        if batch.step in known:
            return  # sent twice, since an answer was lost
        (self._trainer.evaluate if evaluation else self._trainer.submit)(name, batch)

    def _trained(self, name: str) -> Tenant:
        if name not in self._trainer.tenants:
            raise RefusedRequestError("this tenant is not in the trainer: join again", GONE)
        return self._trainer.tenants[name]

    def _checkpoint(self, name: str, step: int) -> dict[str, bytes]:
        tenant = self._trained(name)
        if tenant.step != step:
            raise RefusedRequestError(f"the tenant is at step {tenant.step}, and there is no checkpoint of step {step}")
        account = self._accounts[name]
        if account.saved != step:
            self._save(account)
        return read_files(account.folder.step_folder(step))

    def _save(self, account: Account) -> None:
        step = self._trainer.tenants[account.record.name].step
        self._trainer.save(account.record.name, account.folder.step_folder(step))
        account.folder.keep(step)
        account.saved = step

    def _leave(self, name: str) -> None:
        account = self._account(name)
        if name in self._trainer.tenants:
            self._trainer.leave(name)
        del self._accounts[name]
        account.folder.remove()

    def _watch_silence(self) -> None:
        """Pause tenants that say nothing, and drop those that have been silent for long."""
        own = self._settings.host
        for name, tenant in list(self._trainer.tenants.items()):
            account = self._accounts[name]
            silent = self._clock() - account.seen
            tenant.paused = silent > own.silent_seconds
            if silent > own.drop_seconds:
                self._save(account)
                self._trainer.leave(name)
                account.record = TenantRecord(name, account.record.token_sha256, account.record.settings, dropped=True)
                account.folder.write(account.record)
                account.session = None
                self._forget_dropped()
                logger.warning('tenant "%s" said nothing for %.0f s and is dropped; it may join again', name, silent)

    def _forget_dropped(self) -> None:
        """Keep as many tenants that were dropped as there may be others; the rest has to join as new ones do."""
        dropped = [account for account in self._accounts.values() if account.record.dropped]
        dropped.sort(key=lambda account: account.seen)
        for account in dropped[: -self._settings.host.tenants]:
            del self._accounts[account.record.name]
            account.folder.remove()

    def _collect_costs(self) -> None:
        """Add what the trainer counted to the accounts, which outlive a tenant's leaving and coming back."""
        for name, tenant in self._trainer.tenants.items():
            account = self._accounts[name]
            account.seconds += tenant.seconds
            account.queue_seconds += tenant.queue_seconds
            tenant.seconds = tenant.queue_seconds = 0.0

    def _finish(self, report: TenantReport) -> None:
        account, tenant = self._accounts[report.tenant], self._trainer.tenants[report.tenant]
        account.tokens += int(report.metrics.get("tokens", 0))
        if report.evaluation:
            _keep(account.evaluations, report.step, StepOutcome(report.step, report.metrics))
            return
        account.steps += 1
        # A step that failed was not taken: its report is of the one before.
        step = report.step if "tokens" in report.metrics else report.step + 1
        _keep(account.adapters, tenant.step, self._adapter_bytes(tenant))
        _keep(account.outcomes, step, StepOutcome(step, report.metrics, report.error))

    def _adapter_bytes(self, tenant: Tenant) -> bytes:
        """Encode the adapter as engines load it: safetensors under PEFT's names, in the precision of computation."""
        dtype: torch.dtype = getattr(torch, self._trainer.dtype)
        tensors = tenant.adapter.peft_tensors()
        return save({name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors})

    def _status(self, account: Account, total: float) -> TenantStatus:
        name = account.record.name
        tenant = self._trainer.tenants.get(name)
        silent = self._clock() - account.seen
        status = TenantStatus(name, "dropped", 0, self._weight(name), account.seconds / total if total else 0.0)
        if tenant is not None:
            state = "training" if tenant.waiting else "waiting"
            state = "stopped" if tenant.stopped else "silent" if tenant.paused else state
            status.state, status.step, status.rank = state, tenant.step, tenant.adapter.settings.rank
        status.steps, status.tokens, status.seconds = account.steps, account.tokens, account.seconds
        status.queue_seconds, status.refused = account.queue_seconds, account.refused
        status.last_refusal, status.silent_seconds = account.last_refusal, silent
        status.sampled_tokens = self.sampled().get(name, 0)
        status.cost = account.seconds / 3600 * self._hour()
        return status


def _keep(kept: dict[int, Result], step: int, value: Result) -> None:
    """Add what belongs to a step, and remove what belongs to old ones."""
    kept[step] = value
    for old in sorted(kept)[:-_KEPT_OUTCOMES]:
        del kept[old]


def _check_haste(joined: deque[float]) -> None:
    """Refuse to join too often. Refused attempts count: they cost time, too."""
    if len(joined) == _JOINS and time.monotonic() - joined[0] < _JOIN_SECONDS:
        raise RefusedRequestError(f"{_JOINS} joins within {_JOIN_SECONDS:.0f} s are too many; wait a minute", BUSY)
