"""The interface of an engine, which the server in front of it relies on, and the part that all engines share."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from headway.core.activations import Places, TopStates
from headway.core.prefixes import PrefixSummary
from headway.core.protocol import EngineState, GenerateRequest, WeightReply, WeightState, WeightUpdate
from headway.inference.adapter_table import AdapterTable
from headway.inference.errors import FailedError
from headway.inference.handover.transfers import Offers
from headway.inference.outputs import Chunk, Result

POLICY = "policy"
"""The name under which requests ask for the policy itself, as opposed to an adapter of it."""
Mode = Literal["keep", "wait", "abort"]


class Engine(Protocol):
    """A policy that can be asked for tokens and given new weights. Lives in the server's event loop."""

    max_model_len: int
    vocab_size: int
    block_bytes: int
    """Bytes of a KV block that can be handed to another engine; 0 where none can."""
    max_running: int
    """Sequences that run at a time, at most."""
    max_adapters: int
    """Adapters that requests can use at a time without waiting for each other."""
    takes_images: bool
    """Requests may carry images."""
    no_images: str
    """Why they may not, where they may not."""
    offers: Offers
    """KV that this engine holds for others, where engines move it themselves."""

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Abort the requests in flight and free the device."""
        ...

    @property
    def problem(self) -> str | None:
        """The reason why the engine does not serve right now; None when it does."""
        ...

    def models(self) -> dict[str, int]:
        """Names that requests may ask for, with their versions: the policy and its adapters."""
        ...

    async def generate(self, request: GenerateRequest) -> Result:
        """All of a request's tokens at once. Cancelling the call aborts the request.

        Raises RequestError, BusyError or FailedError.
        """
        ...

    def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """The request's tokens as they come. Closing the iterator aborts the request. Raises as `generate`."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request early, with finish reason "abort". False where no such request is in flight."""
        ...

    def state(self) -> EngineState: ...

    def prefixes(self, salts: dict[str, str] | None = None) -> PrefixSummary | None:
        """Summarize the prefixes in the cache; None where the engine does not say. `salts` names the models whose roots
        are wanted, and the salt of each; by default all, without one."""
        ...

    def weights(self) -> WeightState: ...

    def adapter_weights(self, name: str) -> WeightState | None:
        """The version of adapter `name`; None where there is no such adapter."""
        ...

    async def update(self, update: WeightUpdate) -> WeightReply:
        """Load new weights of the policy, or of `update.adapter`. Raises UpdateError."""
        ...

    async def missing_blocks(self, request: GenerateRequest) -> list[bytes]:
        """Name the KV blocks of a prompt that another engine may have and this one has not."""
        ...

    async def copy_blocks(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the content of the blocks at the start of `names` that are here."""
        ...

    async def adopt_blocks(self, request: GenerateRequest, names: Sequence[bytes], contents: Sequence[bytes]) -> int:
        """Put blocks that `missing_blocks` named into the cache; return how many. None under other weights."""
        ...

    @property
    def has_room(self) -> bool:
        """Tell if a request would start now, without waiting in line."""
        ...

    def hands_over_after(self, request: GenerateRequest) -> int | None:
        """Count the tokens to sample before another engine can go on; None where no other can."""
        ...

    def offering(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request such that its KV can be fetched after its end."""
        ...

    def kv_state(self, request: GenerateRequest) -> str | None:
        """Name the KV of all but the last token, where engines move it themselves: equal names, equal KV. None where
        they do not, or can't move this."""
        ...

    async def top_states(self, places: Sequence[Places], count: int) -> list[TopStates]:
        """Compute the policy's last hidden states at places of sequences, as they go into the head, and return the
        `count` largest numbers of each, by sequence. Raises FailedError."""
        ...

    async def drop_adapter(self, name: str) -> bool:
        """Drop the adapter of this name; False where there is none."""
        ...

    async def pause(self, mode: Mode) -> None:
        """Stop between two steps; returns when stopped. Requests in flight stay (keep), end first (wait) or
        are aborted."""
        ...

    async def resume(self) -> None: ...


Adapters = TypeVar("Adapters", bound=AdapterTable)
Answer = TypeVar("Answer")


class BaseEngine(ABC, Generic[Adapters]):
    """An engine's weights and adapters. `_down` says why it does not serve at all; None when it does."""

    block_bytes = 0
    takes_images = False
    no_images = "this model does not see"

    def __init__(self, adapters: Adapters, version: int, fingerprint: str) -> None:
        self._adapters = adapters
        self._weights = WeightState(version, fingerprint, time.time())
        self._down: str | None = "starting"
        self._update_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.offers = Offers()

    def models(self) -> dict[str, int]:
        return {POLICY: self._weights.version} | self._adapters.versions()

    def weights(self) -> WeightState:
        return self._weights

    def adapter_weights(self, name: str) -> WeightState | None:
        return self._adapters.weights(name)

    def prefixes(self, salts: dict[str, str] | None = None) -> PrefixSummary | None:
        return None

    async def missing_blocks(self, request: GenerateRequest) -> list[bytes]:
        return []

    async def copy_blocks(self, names: Sequence[bytes]) -> list[bytes]:
        return []

    async def adopt_blocks(self, request: GenerateRequest, names: Sequence[bytes], contents: Sequence[bytes]) -> int:
        return 0

    @property
    def has_room(self) -> bool:
        return True

    def hands_over_after(self, request: GenerateRequest) -> int | None:
        return 1

    def offering(self, request: GenerateRequest) -> GenerateRequest:
        return request

    def kv_state(self, request: GenerateRequest) -> str | None:
        return None

    async def top_states(self, places: Sequence[Places], count: int) -> list[TopStates]:
        raise FailedError("this engine does not show its hidden states")

    async def update(self, update: WeightUpdate) -> WeightReply:
        # The client may disconnect meanwhile; the update must still finish, since weights that are half loaded serve
        # nobody and the next update uses the same buffers.
        return await asyncio.shield(self._background(self._update(update)))

    async def _update(self, update: WeightUpdate) -> WeightReply:
        started = time.perf_counter()
        async with self._update_lock:
            self._check_up()
            if self._serves(update):
                return WeightReply(update.version, update.fingerprint, 0.0, 0)
            received = await self._load(update)
            return WeightReply(update.version, update.fingerprint, time.perf_counter() - started, received)

    def _serves(self, update: WeightUpdate) -> bool:
        if update.adapter is not None:
            return self._adapters.serves(update)
        return (self._weights.version, self._weights.fingerprint) == (update.version, update.fingerprint)

    def _check_up(self) -> None:
        """Raise BusyError where the engine can take no update now."""

    @abstractmethod
    async def _load(self, update: WeightUpdate) -> int:
        """Load new weights or an adapter, serve them, and return the bytes received. Raises UpdateError."""

    def _background(self, work: Coroutine[Any, Any, Answer]) -> "asyncio.Task[Answer]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
