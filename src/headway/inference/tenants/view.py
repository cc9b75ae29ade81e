"""An engine as one of its tenants sees it: the tenant's adapter is the policy, and there is nothing else."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import isfinite

from msgspec.structs import replace

from headway.core.activations import Places, TopStates
from headway.core.openai.requests import RequestError
from headway.core.prefixes import PrefixSummary
from headway.core.protocol import EngineState, GenerateRequest, WeightReply, WeightState, WeightUpdate
from headway.inference.engine import POLICY, Engine, Mode
from headway.inference.errors import LoadingError
from headway.inference.outputs import Choice, Chunk, Result
from headway.inference.tenants.admission import Admission
from headway.inference.tenants.shares import Turn


@dataclass(frozen=True, slots=True)
class HostAddress:
    """The host that an engine belongs to: adapters of tenants come from there."""

    url: str
    token: str


class TenantEngine:
    """Implements `inference.engine.Engine` for tenant `name`, over the engine that all share.

    Inside, the adapter has the tenant's name, ids of requests begin with it, and prefixes are cached under `secret`:
    nobody else can name any of them. `share` is the tenant's part of the engine.
    """

    def __init__(
        self, engine: Engine, name: str, secret: str, admission: Admission, host: HostAddress | None = None
    ) -> None:
        self._engine, self.name, self._host = engine, name, host
        self._secret = secret
        self._admission = admission
        self._in_flight: dict[str, Turn] = {}
        self.share = 1.0
        self.prompt_tokens = 0
        self.tokens = 0
        self.max_running, self.max_adapters = engine.max_running, 1
        self.max_model_len, self.vocab_size = engine.max_model_len, engine.vocab_size
        self.block_bytes, self.offers = engine.block_bytes, engine.offers
        self.takes_images = False  # the host's trainer takes none of a tenant's
        self.no_images = "tenants of a host can't use images yet: run it without a host"

    @property
    def problem(self) -> str | None:
        return self._engine.problem

    @property
    def adapter(self) -> WeightState | None:
        """The tenant's adapter; None before the first."""
        return self._engine.adapter_weights(self.name)

    async def start(self) -> None:
        raise RequestError("the engine belongs to the host", status=403)

    async def close(self) -> None:
        raise RequestError("the engine belongs to the host", status=403)

    def models(self) -> dict[str, int]:
        return {POLICY: self.weights().version}

    def adapter_weights(self, name: str) -> WeightState | None:
        return self.adapter if name == POLICY else None

    async def generate(self, request: GenerateRequest) -> Result:
        async with self._turn(request) as turn:
            if not await self._started(turn):
                return Result(request.request_id or "", [_aborted(i) for i in range(request.sampling_params.n)])
            self._count_prompt(request)
            result = await self._engine.generate(self._inner(request))
        self._count(sum(len(choice.token_ids) for choice in result.choices))
        result.request_id = request.request_id or ""
        return result

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        async with self._turn(request) as turn:
            if not await self._started(turn):
                for index in range(request.sampling_params.n):
                    yield Chunk(index, [], [], [], [], "abort")
                return
            self._count_prompt(request)
            chunks = self._engine.stream(self._inner(request))
            try:
                async for chunk in chunks:
                    self._count(len(chunk.token_ids))
                    yield chunk
            finally:
                if (close := getattr(chunks, "aclose", None)) is not None:
                    await close()

    def abort(self, request_id: str) -> bool:
        turn = self._in_flight.get(request_id)
        if turn is None:
            return False
        if turn.running:
            return self._engine.abort(self._own_id(request_id))
        self._admission.withdraw(turn)
        return True

    def abort_all(self) -> None:
        for request_id in list(self._in_flight):
            self.abort(request_id)

    def state(self) -> EngineState:
        """The load that the tenant itself makes, and its own adapter: runs steer by it as if nobody else were here."""
        state, adapter = self._engine.state(), self.adapter
        state.version, state.fingerprint = self.weights().version, self.weights().fingerprint
        state.adapters = {} if adapter is None else {POLICY: adapter.version}
        shares, running = self._admission.shares, max(1, state.running)
        state.running, state.waiting = shares.running_of(self.name), shares.waiting_of(self.name)
        state.tokens_per_second *= min(1.0, state.running / running)
        state.kv_capacity_tokens = int(state.kv_capacity_tokens * self.share)
        state.generated_tokens = self.tokens
        return state

    def prefixes(self, salts: dict[str, str] | None = None) -> PrefixSummary | None:
        summary = self._engine.prefixes({self.name: self._salt(None)})
        if summary is None:
            return None
        return replace(summary, roots={POLICY: summary.roots[self.name]} if self.name in summary.roots else {})

    def weights(self) -> WeightState:
        """The tenant's adapter; before the first, the base model's weights as version 0."""
        return self.adapter or replace(self._engine.weights(), version=0)

    async def update(self, update: WeightUpdate) -> WeightReply:
        if update.adapter not in (POLICY, self.name):
            what = "the base weights" if update.adapter is None else f"adapter {update.adapter!r}"
            raise RequestError(
                f"tenant {self.name} may load its own adapter, {POLICY!r}, and not {what}", "adapter", 403
            )
        if update.mode == "wait":
            raise RequestError('mode "wait" would hold up other tenants; use "keep" or "abort"', "mode", 403)
        if update.mode == "abort":
            self.abort_all()
        return await self._engine.update(
            replace(update, adapter=self.name, mode="keep", transport=self._from_host(update))
        )

    def _from_host(self, update: WeightUpdate) -> dict[str, object]:
        """Fetch from the host, whatever else a tenant names: an engine reads no file and no address of its choice."""
        if update.transport.get("type") != "host" or self._host is None:
            raise RequestError(
                f'engines fetch the adapter of tenant {self.name} from their host only; transport.type is "host" for '
                "tenants of one, and elsewhere whoever has the server's token loads adapters",
                "transport.type",
                403,
            )
        alpha = update.transport.get("alpha")
        if not isinstance(alpha, int | float) or not isfinite(alpha):
            raise RequestError("transport.alpha must be a number", "transport.alpha")
        return {
            "type": "host",
            "url": self._host.url,
            "token": self._host.token,
            "tenant": self.name,
            "alpha": float(alpha),
        }

    async def missing_blocks(self, request: GenerateRequest) -> list[bytes]:
        return await self._engine.missing_blocks(self._inner(request))

    async def copy_blocks(self, names: Sequence[bytes]) -> list[bytes]:
        return await self._engine.copy_blocks(names)

    async def adopt_blocks(self, request: GenerateRequest, names: Sequence[bytes], contents: Sequence[bytes]) -> int:
        return await self._engine.adopt_blocks(self._inner(request), names, contents)

    @property
    def has_room(self) -> bool:
        return self._engine.has_room

    def hands_over_after(self, request: GenerateRequest) -> int | None:
        """Blocks can be handed over. KV that engines move themselves stays: they know of no tenants."""
        return self._engine.hands_over_after(self._inner(request)) if self.block_bytes else None

    def offering(self, request: GenerateRequest) -> GenerateRequest:
        return request

    def kv_state(self, request: GenerateRequest) -> str | None:
        return None

    async def top_states(self, places: Sequence[Places], count: int) -> list[TopStates]:
        raise RequestError("hidden states are shown to the engine's owner alone", status=403)

    async def drop_adapter(self, name: str) -> bool:
        if name not in (POLICY, self.name):
            raise RequestError(f"tenant {self.name} may remove its own adapter, {POLICY!r}, and no other", "name", 403)
        return await self._engine.drop_adapter(self.name)

    async def pause(self, mode: Mode) -> None:
        raise RequestError("pausing would hold up other tenants", status=403)

    async def resume(self) -> None:
        raise RequestError("pausing would hold up other tenants", status=403)

    @asynccontextmanager
    async def _turn(self, request: GenerateRequest) -> AsyncIterator[Turn]:
        """Hold the request's place in line, then its slots. Raises LoadingError where there is no adapter."""
        self._check_adapter()
        request_id = request.request_id or ""
        if request_id in self._in_flight:
            raise RequestError(f"request id {request_id!r} is already in flight", "request_id")
        async with self._admission.turn(self.name, request.sampling_params.n, request.priority) as turn:
            self._in_flight[request_id] = turn
            try:
                yield turn
            finally:
                del self._in_flight[request_id]

    async def _started(self, turn: Turn) -> bool:
        """Wait for the request's turn; False where it was aborted before."""
        started = await self._admission.wait(turn)
        if started:
            self._check_adapter()
        return started

    def _check_adapter(self) -> None:
        if self.adapter is None:
            raise LoadingError(
                f"tenant {self.name} has no adapter here yet: its run loads the first one by POST /adapters",
                retry_after=1,
            )

    def _count_prompt(self, request: GenerateRequest) -> None:
        self.prompt_tokens += len(request.token_ids)
        self._admission.shares.charge(self.name, len(request.token_ids))

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        self._admission.shares.charge(self.name, tokens)

    def _inner(self, request: GenerateRequest) -> GenerateRequest:
        """The request under the names of the engine. Its priority counts among the tenant's own requests only."""
        return replace(
            request,
            model=self.name,
            request_id=self._own_id(request.request_id or ""),
            cache_salt=self._salt(request.cache_salt),
            priority=0,
        )

    def _own_id(self, request_id: str) -> str:
        return f"{self.name}/{request_id}"

    def _salt(self, salt: str | None) -> str:
        return f"{self._secret}/{'' if salt is None else salt}"


def _aborted(index: int) -> Choice:
    return Choice(index, [], [], [], [], "abort")
