"""Last hidden states of given tokens, taken inside vLLM's workers where they go into the head.

vLLM computes logits eagerly, outside of what it compiles or captures: for the prompt, where its logprobs are wanted,
and for the next token. So one request for a single token shows the states of all tokens of its prompt.
"""

import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.core.activations import Places, TopStates
from headway.inference.errors import FailedError
from headway.inference.vllm.internals import watch_head
from headway.models.top_states import top_of

_SHORTEST = 3
"""Tokens of a prompt from which on its states can be told from the one that the next token is drawn from."""


class HeadWatch:
    """Methods for vLLM's workers that watch what goes into the head during one request, which must be alone."""

    model_runner: Any
    _headway_head: "_WatchedHead | None" = None

    def headway_watch_head(self) -> None:
        """Keep all states that go into the head from now on."""
        self._headway_head = _WatchedHead(self.model_runner.get_model())

    def headway_top_states(self, length: int, positions: list[int], count: int) -> list[list[list[Any]]] | None:
        """End the watch. Return the largest numbers of the states at `positions` of a prompt of this length, indices
        first; None where they were not seen."""
        watched, self._headway_head = self._headway_head, None
        states_TD = None if watched is None else watched.end(length)
        if states_TD is None:
            return None
        states = top_of(states_TD[torch.tensor(positions, device=states_TD.device)], count)
        return [states.indices_PK.tolist(), states.values_PK.tolist()]


class _WatchedHead:
    def __init__(self, model: Any) -> None:
        self._seen: list[Tensor] = []
        self._stop: Callable[[], None] = watch_head(model, lambda states: self._seen.append(states.clone()))

    def end(self, length: int) -> Tensor | None:
        self._stop()
        # A prompt computed in chunks comes in parts, each beside a single state to draw from: the last one counts.
        prompt = [states for states in self._seen if len(states) > 1]
        last = [states for states in self._seen if len(states) == 1][-1:]
        whole = sum(map(len, prompt)) == length - 1 and len(last) == 1
        return torch.cat([*prompt, *last]) if whole else None


async def top_states(llm: Any, places: Places, count: int, adapter: Any = None) -> TopStates:
    """Compute the states at places of a sequence. Nothing else may be computed meanwhile. Raises FailedError."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    token_ids, positions = places
    # What follows the last position changes nothing before it, and a full context leaves no room for another token.
    prompt = list(token_ids[: max(positions) + 1])
    prompt += prompt[-1:] * (_SHORTEST - len(prompt))
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    name = f"states-{uuid.uuid4().hex}"
    await llm.collective_rpc("headway_watch_head")
    try:
        async for _ in llm.generate(tokens_input(prompt, cache_salt=name), params, name, lora_request=adapter):
            pass
    finally:
        seen = await llm.collective_rpc("headway_top_states", args=(len(prompt), list(positions), count))
    # With layers spread over workers, the last ones alone have a head.
    found = next((states for states in seen if states is not None), None)
    if found is None:
        raise FailedError("the hidden states that go into vLLM's head were not seen")
    indices, values = found
    return TopStates.of(indices, values)
