"""Probation of new weights: vLLM scores a version's probe, and requests get its tokens once the scores are right."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from headway.core.protocol import WeightProbe, WeightUpdate
from headway.inference.errors import UpdateError
from headway.inference.probe import Served, mismatch
from headway.inference.vllm.internals import VllmLimits
from headway.inference.vllm.updates.weights import LostError

_FIRST = -(2**31)
"""The priority of a probe, where vLLM heeds priorities: before everyone's."""


async def serve_probe(llm: Any, probe: WeightProbe, limits: VllmLimits) -> list[Served]:
    """Score the probe's tokens with each data-parallel engine of `llm`. The schedulers, which are paused, resume with
    them.

    Nothing cached is used: vLLM computes a prompt whose logprobs are wanted anew, and the salt keeps its KV apart.
    """
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    name = f"probe-{uuid.uuid4().hex}"
    prompt = tokens_input(list(probe.token_ids), cache_salt=name)
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    await llm.collective_rpc("headway_watch", args=(list(probe.token_ids),))
    engines, first = limits.engines, _FIRST if limits.priorities else 0
    try:
        answers = [
            await llm.add_request(
                f"{name}-{rank}", prompt, params, priority=first, data_parallel_rank=rank if engines > 1 else None
            )
            for rank in range(engines)
        ]
        await llm.resume_generation()
        outputs = [await answer.get() for answer in answers]
    finally:
        # vLLM passes on what the first engine's workers return.
        streams = [*(await llm.collective_rpc("headway_seen"))[:1], *[None] * (engines - 1)]
    config = llm.model_config
    quantized = (config.quantization or "", llm.vllm_config.cache_config.cache_dtype)
    fp8 = any(name.startswith("fp8") for name in quantized)
    dtype = "fp8" if fp8 else str(config.dtype).removeprefix("torch.")
    return [Served(_logprobs(probe, output), dtype, seen) for output, seen in zip(outputs, streams, strict=True)]


def _logprobs(probe: WeightProbe, output: Any) -> list[float]:
    rows = zip(probe.token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [row[token].logprob for token, row in rows]


class Probation:
    """Holds a version to its probe. `passed` is set except while one is on probation."""

    def __init__(self, llm: Any, limits: VllmLimits) -> None:
        self.passed = asyncio.Event()
        self.passed.set()
        self._llm, self._limits = llm, limits
        self._serving: WeightProbe | None = None

    async def check(self, update: WeightUpdate, revert: Callable[[], Awaitable[None]]) -> None:
        """Let the paused scheduler go on with the weights of `update`, and compare its scores of the probe.

        Raises UpdateError after `revert`, which stops the scheduler and brings the old weights back; LostError
        where these are not what they were.
        """
        if update.probe is None:
            self._serving = None
            return
        self.passed.clear()
        try:
            wrong = await self._mismatch(update.probe)
            if wrong is None:
                self._serving = update.probe
                return
            await revert()
            if self._serving is not None and (still := await self._mismatch(self._serving)) is not None:
                raise LostError(f"vLLM lost its weights: those before version {update.version} are not back, {still}")
        finally:
            self.passed.set()
        raise UpdateError(f"version {update.version} was refused: {wrong}")

    async def _mismatch(self, probe: WeightProbe) -> str | None:
        found = [mismatch(probe, served) for served in await serve_probe(self._llm, probe, self._limits)]
        return next((wrong for wrong in found if wrong is not None), None)
