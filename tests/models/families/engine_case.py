"""An embedded engine over a family's model, driven step by step."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from family_case import run_packed, token_logprobs
from torch import Tensor

from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.inference.outputs import Choice, Result
from headway.models.checkpoints.tensors import hf_tensors, load_hf_tensors
from headway.models.decoder import DecoderLM
from headway.models.serving import StandbyWeights

LIMITS = {"max_running": 8, "max_batched_tokens": 16, "max_model_len": 96, "num_blocks": 56, "block_size": 4}
"""Prompts come in chunks, and a crowd does not fit."""


class ModelCase(Protocol):
    """A model that is made anew at every call, and tokens for it."""

    def fresh(self) -> DecoderLM: ...

    def tokens(self, lengths: Sequence[int], seed: int = 0) -> Tensor: ...


class EngineCase:
    """One engine for all tests of a case. `model` is what it serves; after an update that is another version's."""

    def __init__(self, case: ModelCase) -> None:
        self.case, self.model = case, case.fresh()
        self.engine = EmbeddedEngine(case.fresh(), EngineLimits(**LIMITS))
        self._standby: StandbyWeights | None = None
        self._requests = 0

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        tokens: list[int] = self.case.tokens([length], 1000 * length + seed).tolist()
        return tokens

    def add(self, prompt: list[int], max_tokens: int, **params: Any) -> str:
        self._requests += 1
        name = str(self._requests)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=self._requests, **params)
        self.engine.add(GenerateRequest(prompt, sampling_params=sampling), name)
        return name

    def finish(self) -> dict[str, Result]:
        """Run until nothing is left."""
        results: dict[str, Result] = {}
        for _ in range(5000):
            for active, event in self.engine.step():
                if isinstance(event, Result):
                    results[active.request_id] = event
            if self.engine.idle:
                return results
        raise AssertionError("the engine did not finish")

    def generate(self, prompts: list[list[int]], max_tokens: int, **params: Any) -> list[Result]:
        names = [self.add(prompt, max_tokens, **params) for prompt in prompts]
        results = self.finish()
        return [results[name] for name in names]

    def update(self, version: int) -> None:
        """Serve other weights from the next step on, as an update does."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.1)
        if self._standby is None:
            self._standby = StandbyWeights(self.engine.model)
        load_hf_tensors(self._standby.model, hf_tensors(self.model), self._standby.targets)
        self._standby.activate()
        self.engine.weights_changed(version)


def mismatch(model: DecoderLM, prompts: list[list[int]], results: list[Result]) -> float:
    """The largest difference between the engine's logprobs and the trainer's."""
    return float(mismatches(model, prompts, results).max())


def mismatches(model: DecoderLM, prompts: list[list[int]], results: list[Result]) -> Tensor:
    """By sampled token, how far the engine's logprob is from the trainer's."""
    choices = [result.choices[0] for result in results]
    sequences = [prompt + choice.token_ids for prompt, choice in zip(prompts, choices, strict=True)]
    expected = token_logprobs(model, sequences, **routed(given_experts(choices, sequences), model))
    parts = zip(expected, prompts, choices, strict=True)
    return torch.cat([(own[len(prompt) - 1 :] - torch.tensor(choice.logprobs)).abs() for own, prompt, choice in parts])


def routed(experts_TLk: Tensor | None, model: DecoderLM) -> dict[str, Tensor]:
    """Given experts as an argument of `PackedTokens`; none for dense models."""
    return {} if experts_TLk is None else {"routed_experts_TLk": experts_TLk.to(model.head_weight().device)}


def given_experts(choices: list[Choice], sequences: list[list[int]]) -> Tensor | None:
    """The engine's experts for a pass of the trainer (router replay); the last token of each is left to the router."""
    if choices[0].experts is None:
        return None
    parts = []
    for choice, tokens in zip(choices, sequences, strict=True):
        assert choice.experts is not None and len(choice.experts) == len(tokens) - 1
        chosen = torch.from_numpy(choice.experts.astype(np.int64))
        parts += [chosen, torch.full_like(chosen[:1], -1)]
    return torch.cat(parts)


def same_experts(model: DecoderLM, tokens: list[int], choice: Choice) -> bool:
    """Tell if the trainer's router, left alone, chooses what the engine's chose."""
    with torch.no_grad():
        free = run_packed(model, torch.tensor(tokens), [len(tokens)]).routed_experts_TLk
    assert free is not None and choice.experts is not None
    return bool(np.array_equal(np.sort(choice.experts), np.sort(free[:-1].numpy())))
