"""The engine: requests in, tokens out, step by step. It has no threads and no sockets."""

import logging
import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from headway.core.protocol import GenerateRequest
from headway.inference.embedded.running.drawer import HostTokens, PendingTokens
from headway.inference.embedded.running.input_batch import InputBatch
from headway.inference.embedded.running.runner import Runner
from headway.inference.embedded.running.sampler import choice_seed
from headway.inference.embedded.running.store import KvStore
from headway.inference.embedded.scheduling.blocks import BlockCache, root_hash
from headway.inference.embedded.scheduling.scheduler import EngineLimits, Scheduler, Step
from headway.inference.embedded.scheduling.sequence import Sequence
from headway.inference.embedded.updates.adapters import ServedAdapters
from headway.inference.engine import POLICY, Choice, Chunk, RequestError, Result
from headway.models.decoder import DecoderLM
from headway.models.ops import registry

logger = logging.getLogger(__name__)

_RATE_WINDOW = 5.0


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One request and its sequences, one for each of its `n` choices."""

    request_id: str
    sequences: list[Sequence]
    unfinished: int


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step in flight: `sequences` get one token each, sampled by the weights of `versions`."""

    sequences: list[Sequence]
    versions: list[int]
    tokens: PendingTokens | HostTokens | None


Event = tuple[ActiveRequest, Chunk | Result]


class EmbeddedEngine:
    """Continuous batching over a paged cache. `version` tags every token sampled from now on.

    `depth` is the number of steps in flight when `step` returns: 0 on a CPU, 1 on an accelerator, which then never
    waits for the host. A finished sequence is noticed that many steps late; its extra tokens are dropped.
    """

    def __init__(self, model: DecoderLM, limits: EngineLimits, *, version: int = 0, depth: int | None = None) -> None:
        config = model.config
        self.limits = limits
        self.version = version
        self.adapters = ServedAdapters(model)
        self.generated_tokens = 0
        self.active: dict[str, ActiveRequest] = {}
        self.cache = BlockCache(limits.num_blocks, limits.block_size, prefix_cache=limits.prefix_cache)
        self.scheduler = Scheduler(self.cache, limits, self._root_of)
        self.runner = make_runner(model, limits, ahead=bool(depth))
        self.depth = self.runner.depth if depth is None else depth
        self._launched: deque[LaunchedStep] = deque()
        self._eos = frozenset(config.eos_ids)
        self._arrivals = 0
        # Not `secrets`, which asks the system every time and lets another thread take the interpreter meanwhile.
        self._seeds = random.Random()
        self._epoch = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._rate = 0.0
        self._counted_at = 0.0

    @property
    def model(self) -> DecoderLM:
        return self.runner.model

    @property
    def idle(self) -> bool:
        return not self.active

    @property
    def drained(self) -> bool:
        """True when every request that had started has finished."""
        return not self.scheduler.running and not any(s.preemptions for s in self.scheduler.waiting)

    def add(self, request: GenerateRequest, request_id: str) -> ActiveRequest:
        """Queue a validated request. Raise RequestError if its adapter is gone or its id is taken."""
        if request_id in self.active:
            raise RequestError(f"request id {request_id!r} is already in flight", "request_id")
        adapter = request.model if request.model in self.adapters else None
        if adapter is None and request.model != POLICY:
            raise RequestError(f"model {request.model!r} does not exist", "model", 404)
        sequences = [self._sequence(request, request_id, index, adapter) for index in range(request.sampling_params.n)]
        self._arrivals += 1
        for sequence in sequences:
            self.scheduler.add(sequence)
        active = self.active[request_id] = ActiveRequest(request_id, sequences, len(sequences))
        return active

    def step(self) -> list[Event]:
        """Launch the next step, collect the one launched `depth` steps before, and return its outputs."""
        if self._launched and self.scheduler.may_preempt():
            # A sequence may be preempted in the next step, and must not have tokens in flight then.
            return self.drain()
        step = self.scheduler.schedule()
        if step.sequences:
            self._launched.append(self._launch(step))
        return self._collect() if len(self._launched) > (self.depth if step.sequences else 0) else []

    def drain(self) -> list[Event]:
        """Collect every launched step, so that no step is in flight afterwards."""
        events: list[Event] = []
        while self._launched:
            events += self._collect()
        return events

    def abort(self, request_id: str) -> list[Event]:
        """Stop a request; its unfinished choices end with "abort"."""
        request = self.active.get(request_id)
        if request is None:
            return []
        return self._finish([s for s in request.sequences if s.finish_reason is None], "abort")

    def abort_all(self) -> list[Event]:
        return [event for request_id in list(self.active) for event in self.abort(request_id)]

    def reset(self) -> list[ActiveRequest]:
        """Drop all requests and the whole cache after a failed step. Returns the requests."""
        self._launched.clear()
        active = list(self.active.values())
        for request in active:
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    self.scheduler.remove(sequence)
        self.active.clear()
        self.cache.forget_all()
        return active

    def weights_changed(self, version: int) -> None:
        """Tag tokens with `version` from now on. Running sequences keep their KV; new ones do not reuse it."""
        self.version = version
        self._epoch += 1
        self.cache.forget_all()

    def adapter_changed(self, name: str) -> None:
        """Point running sequences of adapter `name` to its current slot."""
        for sequence in self.scheduler.running:
            if sequence.adapter == name:
                self.runner.rows.adapter[sequence.row] = self.adapters.slot(name)

    def drop_adapter(self, name: str) -> list[Event]:
        """Remove adapter `name` and abort the requests that use it."""
        users = {s.request_id for request in self.active.values() for s in request.sequences if s.adapter == name}
        events = [event for request_id in users for event in self.abort(request_id)]
        self.adapters.drop(name)
        return events

    def tokens_per_second(self) -> float:
        """Sampling rate over the last seconds; 0 if nothing was sampled. Safe to call from another thread."""
        return self._rate if time.monotonic() - self._counted_at < _RATE_WINDOW else 0.0

    def _sequence(self, request: GenerateRequest, request_id: str, index: int, adapter: str | None) -> Sequence:
        params = request.sampling_params
        prompt = request.token_ids
        room = self.limits.max_model_len - len(prompt)
        seed = self._seeds.getrandbits(64) if params.seed is None else choice_seed(params.seed, index)
        return Sequence(
            request_id=request_id,
            index=index,
            order=(request.priority, self._arrivals, index),
            tokens=list(prompt),
            prompt_len=len(prompt),
            params=params,
            seed=seed,
            limit=len(prompt) + (room if params.max_tokens is None else min(params.max_tokens, room)),
            stops=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos),
            streamed=request.stream,
            salt=request.cache_salt,
            adapter=adapter,
        )

    def _root_of(self, sequence: Sequence) -> bytes:
        adapter = sequence.adapter
        return root_hash(sequence.salt, adapter, self.adapters.epoch(adapter), self._epoch)

    def _launch(self, step: Step) -> LaunchedStep:
        """Run the model and sample tokens."""
        for sequence in step.admitted:
            self.runner.enter(sequence, self.adapters.slot(sequence.adapter))
        with torch.inference_mode():
            logits, drawing, which, positions = self.runner.run(step)
            tokens = self.runner.draw(logits, which, positions) if len(drawing) else None
        for sequence, count in zip(step.sequences, step.counts, strict=True):
            sequence.computed += count
        grown = step.sequences if len(drawing) == len(step.sequences) else [step.sequences[i] for i in drawing.tolist()]
        for sequence in grown:
            sequence.ahead += 1
        versions = [self.version if s.adapter is None else self.adapters.version(s.adapter) for s in grown]
        return LaunchedStep(grown, versions, tokens)

    def _collect(self) -> list[Event]:
        """Append the tokens of the oldest launched step. Sequences that finished since then get none."""
        launched = self._launched.popleft()
        if launched.tokens is None:
            return []
        sampled = launched.tokens.result()
        ended: list[Sequence] = []
        events: list[Event] = []
        grown = 0
        tops = sampled.top or [[]] * len(launched.sequences)
        for sequence, version, token, logprob, top in zip(
            launched.sequences, launched.versions, sampled.tokens, sampled.logprobs, tops, strict=True
        ):
            if sequence.finish_reason is not None:
                continue
            sequence.ahead -= 1
            last = sequence.append(token, logprob, version)
            if sequence.params.logprobs:
                sequence.top_logprobs.append(top)
            grown += 1
            if last:
                ended.append(sequence)
            elif sequence.streamed:
                events.append((self.active[sequence.request_id], _chunk(sequence)))
        self._count(grown)
        return events + self._finish(ended)

    def _finish(self, sequences: Iterable[Sequence], reason: str | None = None) -> list[Event]:
        """Remove sequences; a request without unfinished ones gets its result."""
        events: list[Event] = []
        for sequence in sequences:
            if reason == "abort":
                sequence.finish_reason = "abort"
            request = self.active[sequence.request_id]
            sequence.experts = self.runner.experts_of(sequence)
            self.scheduler.remove(sequence)
            if sequence.streamed:
                events.append((request, _chunk(sequence)))
            request.unfinished -= 1
            if request.unfinished == 0:
                del self.active[request.request_id]
                events.append((request, _result(request)))
        return events

    def _count(self, tokens: int) -> None:
        self.generated_tokens += tokens
        now = self._counted_at = time.monotonic()
        self._recent.append((now, self.generated_tokens))
        while now - self._recent[0][0] > _RATE_WINDOW:
            self._recent.popleft()
        since, before = self._recent[0]
        if now > since:
            self._rate = (self.generated_tokens - before) / (now - since)


def make_runner(model: DecoderLM, limits: EngineLimits, *, ahead: bool) -> Runner:
    """Build the runner for the model's device, with its KV store."""
    weight, config = model.head_weight(), model.config
    on_device = registry.in_triton(weight)
    store = KvStore(
        config.layers,
        limits.num_blocks + on_device,
        limits.block_size,
        config.kv_heads,
        config.head_dim,
        dtype=weight.dtype,
        device=weight.device,
    )
    rows = InputBatch(limits.max_running, -(-limits.max_model_len // limits.block_size))
    if not on_device:
        return Runner(model, store, rows, ahead=ahead)
    from headway.inference.embedded.running.device_runner import DeviceRunner

    runner = DeviceRunner(model, store, rows)
    try:
        runner.warm_up()
    except Exception:
        logger.exception("fused kernels failed on this device; serving with slower torch operations instead")
        registry.disable("triton")
        return Runner(model, store, rows, ahead=ahead)
    return runner


def _chunk(sequence: Sequence) -> Chunk:
    start = sequence.emitted
    sequence.emitted = sequence.output_len
    return Chunk(
        sequence.index,
        sequence.tokens[sequence.prompt_len + start :],
        sequence.logprobs[start:],
        sequence.top_logprobs[start:],
        list(sequence.versions),
        sequence.finish_reason,
    )


def _result(request: ActiveRequest) -> Result:
    choices = []
    for s in request.sequences:
        assert s.finish_reason is not None
        output = s.tokens[s.prompt_len :]
        choices.append(Choice(s.index, output, s.logprobs, s.top_logprobs, s.versions, s.finish_reason, s.experts))
    first = request.sequences[0]
    prompt = [None, *first.prompt_logprobs] if first.wants_prompt_logprobs else None
    return Result(request.request_id, choices, first.cached, prompt)
