"""The engine: requests in, tokens out, step by step. It has no threads and no sockets."""

import logging
import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headway.core.draws import choice_seed
from headway.core.openai.requests import RequestError
from headway.core.protocol import GenerateRequest
from headway.inference.embedded.adapters import ServedAdapters
from headway.inference.embedded.cache.block_files import BlockFiles
from headway.inference.embedded.cache.block_rows import BlockRows
from headway.inference.embedded.cache.host_tier import HostTier
from headway.inference.embedded.device.step_clock import StepClock
from headway.inference.embedded.requests import ActiveRequest, Event, next_chunk
from headway.inference.embedded.running.runners import make_runner
from headway.inference.embedded.sampling.drawer import HostTokens, PendingTokens
from headway.inference.embedded.scheduling.blocks import BlockCache
from headway.inference.embedded.scheduling.roots import PrefixRoots
from headway.inference.embedded.scheduling.scheduler import EngineLimits, Scheduler, Step
from headway.inference.embedded.scheduling.sequence import Sequence
from headway.inference.embedded.scheduling.snapshots import Snapshots
from headway.inference.engine import POLICY
from headway.inference.errors import FailedError
from headway.inference.images import ServedImage
from headway.inference.rate import SamplingRate
from headway.models.configs.config import ModelConfig
from headway.models.configs.recurrent import RecurrentState
from headway.models.costs import layer_caches
from headway.models.decoder import DecoderLM
from headway.models.vision.config import VisionConfig

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

_REPEATED_SECONDS = 0.016
"""A step and its repetitions take no longer than this: new requests and weights wait for them."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step in flight: `sequences` get a token each from every one of its repetitions, sampled by the weights of
    `versions`."""

    sequences: list[Sequence]
    versions: list[int]
    tokens: list[PendingTokens | HostTokens]
    marks: tuple[torch.cuda.Event | None, torch.cuda.Event | None] | None
    """On the device's clock, around a step in which everyone decodes."""


class EmbeddedEngine:
    """Continuous batching over a paged cache. `version` tags every token sampled from now on.

    `depth` is the number of steps in flight when `step` returns: 0 on a CPU, 1 on an accelerator, which then never
    waits for the host. A finished sequence is noticed that many steps late; its extra tokens are dropped.
    """

    def __init__(self, model: DecoderLM, limits: EngineLimits, *, version: int = 0, depth: int | None = None) -> None:
        config = model.config
        self.limits = limits
        self.version = version
        self.adapters = ServedAdapters(model, limits.max_adapters, limits.max_host_adapters)
        self.active: dict[str, ActiveRequest] = {}
        self.cache = make_block_cache(config, limits)
        whole_images = isinstance(config, VisionConfig) and config.bidirectional_images
        self.scheduler = Scheduler(
            self.cache, limits, lambda s: self.root_of(s.salt, s.adapter), whole_images=whole_images
        )
        self.runner = make_runner(model, limits, ahead=bool(depth))
        self.block_rows = BlockRows(self.runner.store, self.runner.recorded)
        self.depth = self.runner.depth if depth is None else depth
        self._launched: deque[LaunchedStep] = deque()
        self._eos = frozenset(config.eos_ids)
        self._arrivals = 0
        # Not `secrets`, which asks the system every time and lets another thread take the interpreter meanwhile.
        self._seeds = random.Random()
        layout = (config.family, limits.block_size, str(self.runner.store.keys[0].numbers.dtype))
        self.roots = PrefixRoots(self._seeds.getrandbits(128), layout)
        self.sampled = SamplingRate()
        self.clock = StepClock(self.runner.device, _REPEATED_SECONDS)

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

    def add(
        self,
        request: GenerateRequest,
        request_id: str,
        grammar: "LLMatcher | None" = None,
        images: tuple[ServedImage, ...] = (),
    ) -> ActiveRequest:
        """Queue a validated request, whose replies must match `grammar`, and its images. Raise RequestError if its
        adapter is gone or its id is taken."""
        if request_id in self.active:
            raise RequestError(f"request id {request_id!r} is already in flight", "request_id")
        adapter = request.model if request.model in self.adapters else None
        if adapter is None and request.model != POLICY:
            raise RequestError(f"model {request.model!r} does not exist", "model", 404)
        choices = range(request.sampling_params.n)
        sequences = [self._sequence(request, request_id, index, adapter, images) for index in choices]
        self._arrivals += 1
        for sequence in sequences:
            sequence.grammar = grammar
            self.scheduler.add(sequence)
        active = self.active[request_id] = ActiveRequest(request_id, sequences, len(sequences))
        return active

    def step(self) -> list[Event]:
        """Launch the next step, collect the one launched `depth` steps before, and return its outputs."""
        if self._launched and self.scheduler.may_preempt():
            # A sequence may be preempted in the next step, and must not have tokens in flight then.
            return self.drain()
        step = self.scheduler.schedule(self._most_repeats())
        if step.sequences:
            self._launched.append(self._launch(step))
        return self._collect() if len(self._launched) > (self.depth if step.sequences else 0) else []

    def drain(self) -> list[Event]:
        """Collect every launched step, so that no step is in flight afterwards."""
        events: list[Event] = []
        while self._launched:
            events += self._collect()
        return events

    def add_host_tier(self, num_blocks: int, files: BlockFiles | None = None) -> None:
        """Keep `num_blocks` blocks that the cache gives up in host memory, and in `files`. Models with recurrent layers
        have no use for blocks without the states that belong to them."""
        if self.limits.prefix_cache and self.cache.snapshots is None and num_blocks > 0:
            self.cache.tier = HostTier(self.block_rows, num_blocks, files=files)

    def abort(self, request_id: str) -> list[Event]:
        """Stop a request; its unfinished choices end with "abort"."""
        request = self.active.get(request_id)
        if request is None:
            return []
        return self._finish([s for s in request.sequences if s.finish_reason is None], "abort")

    def abort_all(self) -> list[Event]:
        return [event for request_id in list(self.active) for event in self.abort(request_id)]

    def reset(self) -> None:
        """Drop all requests and the whole cache after a failed step."""
        self._launched.clear()
        for request in self.active.values():
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    self.scheduler.remove(sequence)
        self.active.clear()
        self.cache.forget_all()

    def weights_changed(self, version: int, fingerprint: str = "") -> None:
        """Tag tokens with `version` from now on. Running sequences keep their KV; new ones do not reuse it."""
        self.version = version
        self.roots.weights_changed(fingerprint)
        if self.runner.images is not None:
            self.runner.images.forget_features()
        self._mark_mixed(self.scheduler.running)
        self.cache.forget_all()

    def adapter_changed(self, name: str) -> None:
        """Point running sequences of adapter `name` to its current slot."""
        users = [sequence for sequence in self.scheduler.running if sequence.adapter == name]
        for sequence in users:
            self.runner.rows.adapter[sequence.row] = self.adapters.slot(name)
        self._mark_mixed(users)

    def adapters_in_use(self) -> set[str | None]:
        """Name the adapters of all sequences, running or not."""
        return {sequence.adapter for request in self.active.values() for sequence in request.sequences}

    def drop_adapter(self, name: str) -> list[Event]:
        """Remove adapter `name` and abort the requests that use it."""
        users = {s.request_id for request in self.active.values() for s in request.sequences if s.adapter == name}
        events = [event for request_id in users for event in self.abort(request_id)]
        self.adapters.drop(name)
        return events

    def _sequence(
        self,
        request: GenerateRequest,
        request_id: str,
        index: int,
        adapter: str | None,
        images: tuple[ServedImage, ...],
    ) -> Sequence:
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
            stream_interval=request.stream_interval,
            stream_seconds=request.stream_seconds,
            salt=request.cache_salt,
            adapter=adapter,
            experts_start=request.routed_experts_start,
            begun=request.begun,
            images=images,
        )

    def root_of(self, salt: str | None, adapter: str | None) -> bytes:
        """Return the root of block hashes under a salt and an adapter."""
        return self.roots.of(salt, adapter, self.adapters.fingerprint(adapter))

    def _mark_mixed(self, sequences: Iterable[Sequence]) -> None:
        """Keep the KV of sequences that go on under other weights to themselves."""
        for sequence in sequences:
            sequence.mixed = True
            sequence.root = self.roots.of_mixed(sequence.order)
            sequence.hashes = [sequence.root] * len(sequence.hashes)

    def _launch(self, step: Step) -> LaunchedStep:
        """Run the model and sample tokens."""
        in_use = {sequence.adapter for sequence in self.scheduler.running} if step.admitted else ()
        for sequence in step.admitted:
            self.runner.enter(sequence, self.adapters.bring(sequence.adapter, in_use))
        tokens, started = [], self.clock.mark()
        with torch.inference_mode():
            for repetition in range(step.repeats):
                logits, drawing, which, positions = self.runner.run(step, again=repetition > 0)
                if len(drawing):
                    tokens.append(self.runner.draw(logits, which, positions))
        for sequence, count in zip(step.sequences, step.counts, strict=True):
            sequence.computed += count + step.repeats - 1
        grown = step.sequences if len(drawing) == len(step.sequences) else [step.sequences[i] for i in drawing.tolist()]
        for sequence in grown:
            sequence.ahead += step.repeats
        versions = [self.version if s.adapter is None else self.adapters.version(s.adapter) for s in grown]
        marks = (started, self.clock.mark()) if max(step.counts) == 1 else None
        return LaunchedStep(grown, versions, tokens, marks)

    def _collect(self) -> list[Event]:
        """Append the tokens of the oldest launched step. Sequences that finished since then get none."""
        launched = self._launched.popleft()
        if not launched.tokens:
            return []
        sampled = [tokens.result() for tokens in launched.tokens]
        now, running = time.perf_counter(), len(self.scheduler.running)
        if launched.marks is not None:
            self.clock.count(*launched.marks, len(sampled))
        ended: list[Sequence] = []
        failed: list[Sequence] = []
        events: list[Event] = []
        grown = 0
        tops = sampled[0].top or [[]] * len(launched.sequences)
        tokens = zip(*(each.tokens for each in sampled), strict=True)
        logprobs = zip(*(each.logprobs for each in sampled), strict=True)
        for sequence, version, its_tokens, its_logprobs, top in zip(
            launched.sequences, launched.versions, tokens, logprobs, tops, strict=True
        ):
            if sequence.finish_reason is not None:
                continue
            sequence.ahead -= len(its_tokens)
            total = sum(its_logprobs)
            if total != total:
                failed.append(sequence)
                continue
            grown += sequence.extend(its_tokens, its_logprobs, version)
            if sequence.params.logprobs:
                sequence.top_logprobs.append(top)
            if sequence.finished:
                ended.append(sequence)
            elif sequence.chunk_is_due(now, running):
                sequence.emitted_at = now
                events.append((self.active[sequence.request_id], next_chunk(sequence)))
        self.sampled.count(grown)
        events += self._finish(ended)
        return events + self._fail(failed) if failed else events

    def _most_repeats(self) -> int:
        """Repeat short steps for a few milliseconds, so that the host's work for a step does not hold the device up.

        Filters and top logprobs are drawn on the host, which then has to see every step.
        """
        running, most = self.scheduler.running, self.runner.most_repeats
        if most == 1 or not running or self.runner.rows.special[[s.row for s in running]].any():
            return 1
        return max(1, min(most, int(_REPEATED_SECONDS / self.clock.seconds)))

    def _fail(self, sequences: list[Sequence]) -> list[Event]:
        """Drop the requests of sequences whose logits were not finite while others' were; their KV is not reused."""
        failed = {s.request_id: self.active[s.request_id] for s in sequences if s.request_id in self.active}
        for request in failed.values():
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    sequence.finish_reason = "abort"
                    self.scheduler.remove(sequence)
            del self.active[request.request_id]
        self.cache.forget_all()
        error = FailedError("the logits of this request are not finite")
        return [(request, error) for request in failed.values()]

    def _finish(self, sequences: list[Sequence], reason: str | None = None) -> list[Event]:
        """Remove sequences; a request without unfinished ones gets its result. Those that end by themselves have just
        got their last token, so all that led to it is computed."""
        events: list[Event] = []
        self.runner.read_experts(sequences, computed=reason != "abort")
        for sequence in sequences:
            if reason == "abort":
                sequence.finish_reason = "abort"
            request = self.active[sequence.request_id]
            self.scheduler.remove(sequence)
            if sequence.streamed:
                events.append((request, next_chunk(sequence)))
            request.unfinished -= 1
            if request.unfinished == 0:
                del self.active[request.request_id]
                events.append((request, request.result()))
        return events


def make_block_cache(config: ModelConfig, limits: EngineLimits) -> BlockCache:
    """Build the blocks' bookkeeping. In models with recurrent layers prefixes are reused where states are kept."""
    if not any(isinstance(cache, RecurrentState) for cache in layer_caches(config)):
        return BlockCache(limits.num_blocks, limits.block_size, prefix_cache=limits.prefix_cache)
    reuses = limits.prefix_cache and limits.snapshots > 0
    snapshots = Snapshots(limits.max_running, limits.snapshots) if reuses else None
    return BlockCache(limits.num_blocks, limits.block_size, prefix_cache=reuses, snapshots=snapshots)
