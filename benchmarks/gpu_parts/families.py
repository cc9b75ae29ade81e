"""Families in the shapes of real models: logprobs of the GPU's engine and trainer beside those of the CPU's engine.

PYTHONPATH=benchmarks python -m gpu_parts.families glm-4.5        # a shape of gpu_parts.family_shapes, or several
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_parts.family_shapes import SHAPES
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.running.device_runner import DeviceRunner
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.inference.outputs import Choice, Result
from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.packed import PackedTokens
from headway.models.registry import config_from_hf

LENGTHS, OUTPUT, LONGEST = (25, 150, 400), 40, 512
"""Prompts in chunks beside decoding, most of them longer than any window and than sparse attention's choice."""
LIMITS = EngineLimits(8, 256, LONGEST, 8 * LONGEST // 16, 16, prefix_cache=False)
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}

Row = dict[str, Any]
"""`name`, largest `error`, `mean` error, `tolerance` (None: nothing is promised), `note`."""


@dataclass
class Generated:
    """A prompt, what an engine sampled after it, and its logprobs of all tokens except the first."""

    prompt: list[int]
    choice: Choice
    scored: Result
    """The request of its own that scored the prompt; in a low precision it may choose other experts."""

    @property
    def prefill(self) -> list[float]:
        return prompt_logprobs(self.scored)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.choice.token_ids

    @property
    def logprobs(self) -> Tensor:
        return torch.tensor(self.prefill + self.choice.logprobs)


def check(shape: str, device: str = "cuda") -> list[Row]:
    """Compare both precisions on `device` with float32 on the CPU, all with the same weights."""
    config = config_from_hf({"bos_token_id": None, "eos_token_id": None, **SHAPES[shape]})
    source = make_model(config, device)
    reference = copy_of(source, torch.float32, "cpu")
    rows: list[dict[str, Any]] = []
    for dtype in TOLERANCES:
        rows += compare(copy_of(source, dtype, device), reference)
    return rows


def compare(model: DecoderLM, reference: DecoderLM) -> Iterator[Row]:
    """Rows for prefill and decoding of the engine, for the trainer, and for CUDA graphs, where the engine has some."""
    dtype = model.head_weight().dtype
    tolerance = TOLERANCES[dtype]
    engine = EmbeddedEngine(model, LIMITS)
    drawn = generate(engine, prompts(model.config))
    expected = [torch.tensor(prompt_logprobs(score(EmbeddedEngine(reference, LIMITS), one.tokens))) for one in drawn]
    other = other_experts(reference, drawn)
    note = f"logprobs vary by {float(torch.cat(expected).std()):.1f}"
    if other is not None:
        note += f", {100 * other:.2g} % of choices went to other experts"
    yield from parts(f"{name_of(dtype)} engine", drawn, expected, None if other else tolerance, note)
    if other is not None:
        expected = [trainer_logprobs(reference, one) for one in drawn]
        yield from parts(f"{name_of(dtype)} engine, experts replayed", drawn, expected, tolerance)
    # The same device and precision: what training with the engine's samples sees as mismatch.
    yield from parts(
        f"{name_of(dtype)} trainer beside engine", drawn, [trainer_logprobs(model, d) for d in drawn], tolerance
    )
    yield from compare_graphs(engine, drawn, tolerance)


def compare_graphs(engine: EmbeddedEngine, drawn: list[Generated], tolerance: float) -> Iterator[Row]:
    """The same requests without CUDA graphs: tokens up to the first other one, which rounding may bring."""
    name = f"{name_of(engine.model.head_weight().dtype)} CUDA graphs on and off"
    runner = engine.runner
    captured = len(runner.graphs) if isinstance(runner, DeviceRunner) and runner.graphs.enabled else 0
    if not captured:
        kind = type(runner).__name__
        yield {"name": name, "error": 0.0, "mean": 0.0, "tolerance": None, "note": f"none captured ({kind})"}
        return
    eager = EmbeddedEngine(engine.model, LIMITS)
    assert isinstance(eager.runner, DeviceRunner)
    eager.runner.graphs.enabled = False
    eager.runner.graphs._graphs.clear()
    gaps = []
    for one, two in zip(drawn, generate(eager, [d.prompt for d in drawn]), strict=True):
        pairs = zip(one.choice.token_ids, two.choice.token_ids, strict=True)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), OUTPUT)
        gaps.append((torch.tensor(one.choice.logprobs) - torch.tensor(two.choice.logprobs))[:same])
    yield row(name, torch.cat(gaps), tolerance, f"{captured} graphs")


def parts(name: str, drawn: list[Generated], expected: list[Tensor], tolerance: float | None, note: str = "") -> Any:
    """Rows for the tokens of prompts and for those that were sampled."""
    gaps = [one.logprobs - other for one, other in zip(drawn, expected, strict=True)]
    split = [gap.split([len(one.prompt) - 1, OUTPUT]) for gap, one in zip(gaps, drawn, strict=True)]
    yield row(f"{name}, prefill", torch.cat([prefill for prefill, _ in split]), tolerance, note)
    yield row(f"{name}, decode", torch.cat([decoded for _, decoded in split]), tolerance, note)


def row(name: str, gaps: Tensor, tolerance: float | None, note: str = "") -> Row:
    gaps = gaps.abs()
    error, mean = float(gaps.max()), float(gaps.mean())
    return {"name": name, "error": error, "mean": mean, "tolerance": tolerance, "note": note}


def make_model(config: ModelConfig, device: str) -> DecoderLM:
    """Random weights in bfloat16, with norms off 1 and biases off 0."""
    model = build_model(config, device=device, dtype=torch.bfloat16)
    draw = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=draw, device=device))
    return model


def copy_of(source: DecoderLM, dtype: torch.dtype, device: str) -> DecoderLM:
    model = build_model(source.config, device=device, dtype=dtype, seed=None)
    model.load_state_dict({name: tensor.to(device) for name, tensor in source.state_dict().items()})
    return model.eval()


def prompts(config: ModelConfig) -> list[list[int]]:
    return [[(31 * i * i + 17 * j + i) % config.vocab_size for i in range(n)] for j, n in enumerate(LENGTHS)]


def generate(engine: EmbeddedEngine, asked: list[list[int]]) -> list[Generated]:
    """Sample after each prompt, all at once; the prompts' own logprobs come from requests of their own, since steps
    that score prompts use no CUDA graphs."""
    params = SamplingParams(max_tokens=OUTPUT, seed=1, ignore_eos=True)
    results = run(engine, [GenerateRequest(tokens, sampling_params=params) for tokens in asked])
    pairs = zip(asked, results, strict=True)
    return [Generated(tokens, result.choices[0], score(engine, tokens)) for tokens, result in pairs]


def score(engine: EmbeddedEngine, tokens: list[int]) -> Result:
    """Run a request that asks for logprobs of its own tokens."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    (result,) = run(engine, [GenerateRequest(tokens, sampling_params=params)])
    return result


def prompt_logprobs(scored: Result) -> list[float]:
    """Logprobs of all tokens of the prompt except the first."""
    assert scored.prompt_logprobs is not None
    return [each[0][1] for each in scored.prompt_logprobs[1:] if each is not None]


def run(engine: EmbeddedEngine, requests: list[GenerateRequest]) -> list[Result]:
    done: dict[str, Result] = {}
    for number, request in enumerate(requests):
        engine.add(request, str(number))
    while not engine.idle:
        for active, event in engine.step():
            if not isinstance(event, Result):
                raise RuntimeError(str(event))
            done[active.request_id] = event
    return [done[str(number)] for number in range(len(requests))]


def trainer_logprobs(model: DecoderLM, drawn: Generated) -> Tensor:
    """Logprobs of packed passes, with the experts that the engine chose: where it scored the prompt, and where it
    sampled after it."""
    scored = packed_logprobs(model, drawn.prompt, given_experts(drawn.scored.choices[0]))
    whole = packed_logprobs(model, drawn.tokens, given_experts(drawn.choice))
    return torch.cat([scored, whole[len(scored) :]])


def packed_logprobs(model: DecoderLM, token_ids: list[int], experts: Tensor | None) -> Tensor:
    device = model.head_weight().device
    plan = PackedPlan([len(token_ids)], device)
    tokens = PackedTokens(
        torch.tensor(token_ids, device=device),
        plan.positions,
        plan,
        routed_experts_TLk=None if experts is None else experts[: len(token_ids)].to(device),
    )
    with torch.no_grad():
        logprobs = torch.log_softmax(model.logits(model(tokens).hidden_TD), -1)
        return logprobs[:-1].gather(1, tokens.token_ids_T[1:, None])[:, 0].float().cpu()


def given_experts(choice: Choice) -> Tensor | None:
    """The engine's choice by token, layer and k; the last token, which it never ran, has none."""
    if choice.experts is None:
        return None
    chosen = torch.from_numpy(choice.experts.astype("int64"))
    return torch.cat([chosen, torch.full_like(chosen[:1], -1)])


def other_experts(reference: DecoderLM, drawn: list[Generated]) -> float | None:
    """The share of choices that the reference's router, left alone, would have made otherwise; None without experts."""
    if not reference.config.experts:
        return None
    same = total = 0
    for one in drawn:
        given, plan = given_experts(one.choice), PackedPlan([len(one.tokens)])
        assert given is not None
        with torch.no_grad():
            free = reference(PackedTokens(torch.tensor(one.tokens), plan.positions, plan)).routed_experts_TLk
        routed = given[:-1] >= 0
        found = (given[:-1, :, :, None] == free[:-1, :, None, :]).any(-1)
        same, total = same + int((found & routed).sum()), total + int(routed.sum())
    return 1 - same / total


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in sys.argv[1:]:
        for found in check(shape, device):
            print(json.dumps({"shape": shape, **found}), flush=True)


if __name__ == "__main__":
    main()
