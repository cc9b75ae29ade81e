"""What it costs to verify strangers' replies, and to prove them, beside what it costs to sample them, on one GPU.

PYTHONPATH=src:benchmarks python -m gpu_parts.verification qwen3-0.6b results/verification_h200.json
… --parts rescoring proving                                              # some of it, on a CPU with a tiny model

Rescoring is one pass over a group's replies, which gives logprobs, draws and the states to compare proofs with. A
worker's proof is a pass of its own after sampling; vLLM makes it reply by reply.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from engine_parts.work import SHAPES
from gpu_parts.cases import Case, Outcome, run_cases, scratch_folder, table, write
from gpu_parts.engine import make_engine, measure, prompts
from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import ModelSettings
from headway.core.episodes import Episode, Node, Task, Trace
from headway.inference.embedded.engine import EmbeddedEngine
from headway.inference.embedded.scheduling.scheduler import EngineLimits
from headway.inference.embedded.service import EmbeddedService
from headway.inference.embedded.states import top_states
from headway.inference.engine import Engine
from headway.inference.serve import load_engine
from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.packed import PackedTokens
from headway.models.tiny import resolve_model
from headway.swarm.messages.orders import Contribution
from headway.swarm.trust.checks.activations import claimed_states, compare
from headway.swarm.trust.rescore import rescore_all
from headway.swarm.work.prove import prove

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
SMALL = ModelConfig("qwen3", 512, 128, 2, 4, 2, 32, 256, tied=True, max_len=1024)
SEQUENCES, PROMPT, OUTPUT, GROUP, ROUNDS = (256, 64, 512, 16, 5) if ON_GPU else (4, 16, 64, 4, 2)
PARTS = {"sampling": 150.0, "rescoring": 120.0, "proving": 120.0, "proving with vllm": 150.0}
"""With seconds that each may take."""


def sampling(shape: str) -> dict[str, float]:
    """Seconds of a reply that the embedded service samples among many."""
    found = measure(shape, SEQUENCES, PROMPT, OUTPUT)
    return {"seconds_a_reply": OUTPUT / found["tokens_per_second"], **found}


def rescoring(shape: str) -> dict[str, Any]:
    """Seconds of a reply that is computed again with its group: all of it with the comparison of the proofs, the
    layers' part of the pass, and the comparison alone."""
    model = build_model(config_of(shape), device=DEVICE, dtype=DTYPE).eval()
    traces = [(episode.traces[0], seed) for seed, episode in enumerate(group())]
    lengths = [PROMPT + OUTPUT] * GROUP
    ids_T = torch.tensor([token for trace, _ in traces for node in trace.nodes for token in node.token_ids])

    @torch.no_grad()
    def layers() -> None:
        plan = PackedPlan(lengths, DEVICE)
        model(PackedTokens(ids_T.to(DEVICE), plan.positions, plan))

    proofs = proofs_of(model)
    contribution = Contribution("order", "bfloat16", group(), proofs)
    rescored = rescore_all(model, traces, 1.0)

    def comparison() -> None:
        compare(claimed_states(contribution, model.config.width), rescored.states_PD)

    def whole() -> None:
        states_PD = rescore_all(model, traces, 1.0).states_PD
        compare(claimed_states(contribution, model.config.width), states_PD)

    found: dict[str, Any] = {name: timed(work) for name, work in (("whole", whole), ("layers", layers))}
    found["comparison"] = timed(comparison)
    errors, _ = compare(claimed_states(contribution, model.config.width), rescored.states_PD)
    return {
        "seconds_a_reply": median(found["whole"]),
        "layers_seconds_a_reply": median(found["layers"]),
        "comparison_seconds_a_reply": median(found["comparison"]),
        "states": len(rescored.states_PD),
        "proof_error": float(np.max(errors)),
        "each": found["whole"],
    }


def proving(shape: str) -> dict[str, Any]:
    """Seconds of a reply in the proof pass of a worker with the embedded engine, which does nothing else."""
    config = config_of(shape)
    engine = make_engine(config, GROUP, PROMPT + OUTPUT) if ON_GPU else small_engine(build_model(config).eval())
    return asyncio.run(_prove(EmbeddedService(engine, fingerprint=""), config.width))


def proving_with_vllm(shape: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same with vLLM, as contributors run it."""
    os.environ.update({"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"})
    from headway.inference.vllm.arguments import SEEDED_SAMPLER

    config = config_of(shape)
    with tempfile.TemporaryDirectory(dir=scratch_folder(8)) as name:
        folder = Path(name) / "model"
        save_checkpoint(build_model(config, device=DEVICE, dtype=DTYPE), folder, files_from=resolve_model("tiny"))
        settings = ServeSettings(
            model=ModelSettings(path=str(folder), dtype="bfloat16" if ON_GPU else "float32"),
            inference=InferenceSettings(
                engine="vllm",
                max_running=GROUP,
                kv_memory_gb=8.0 if ON_GPU else 0.2,
                threads=None if ON_GPU else 1,
                vllm={"logits_processors": [SEEDED_SAMPLER], **arguments},
            ),
            seq_len=PROMPT + OUTPUT + 16,
        )
        return asyncio.run(_prove(load_engine(settings, folder), config.width))


async def _prove(engine: Engine, width: int) -> dict[str, Any]:
    await engine.start()
    seconds = []
    try:
        for _ in range(ROUNDS + 1):
            began = time.perf_counter()
            proofs = await prove(group(), engine.top_states, width)
            seconds.append((time.perf_counter() - began) / GROUP)
    finally:
        await engine.close()
    return {"seconds_a_reply": median(seconds[1:]), "bytes_a_reply": len(proofs[0]), "each": seconds[1:]}


def proofs_of(model: DecoderLM) -> list[bytes]:
    """The proofs of a group by the embedded engine with this model."""
    engine = small_engine(model)

    async def states_of(places: Any, count: int) -> Any:
        return top_states(engine, places, count)

    return asyncio.run(prove(group(), states_of, model.config.width))


def small_engine(model: DecoderLM) -> EmbeddedEngine:
    """An engine with hardly any KV cache: a proof's pass uses none."""
    return EmbeddedEngine(model, EngineLimits(1, 1024, PROMPT + OUTPUT, 64, 16, prefix_cache=False))


def timed(work: Callable[[], None]) -> list[float]:
    """Seconds per reply of rounds, the first left out."""
    seconds = []
    for _ in range(ROUNDS + 1):
        if ON_GPU:
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if ON_GPU:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / GROUP)
    return seconds[1:]


def config_of(shape: str) -> ModelConfig:
    return replace(SHAPES[shape], max_len=PROMPT + OUTPUT + 16) if ON_GPU else SMALL


def group() -> list[Episode]:
    """Replies of a group, of any tokens."""
    vocab = 100_000 if ON_GPU else SMALL.vocab_size
    tokens = [[token % vocab for token in each] for each in prompts(GROUP, PROMPT + OUTPUT)]
    return [Episode(str(n), "group", "env", Task("task"), traces=[_trace(each)]) for n, each in enumerate(tokens)]


def _trace(tokens: list[int]) -> Trace:
    said = Node(0, tokens[PROMPT:], logprobs=[-1.0] * OUTPUT)
    return Trace(nodes=[Node(-1, tokens[:PROMPT]), said])


def cases_of(shape: str, parts: Sequence[str]) -> list[Case]:
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [GROUP]}
    flash = {"attention_config": {"backend": "FLASH_ATTN"}}
    vllm = [{**flash, "compilation_config": graphs}, {**flash, "enforce_eager": True}] if ON_GPU else [{}]
    return [
        Case(part, "verification", part.replace(" ", "_"), [[shape, each] for each in vllm], PARTS[part])
        if "vllm" in part
        else Case(part, "verification", part, [[shape]], PARTS[part])
        for part in parts
    ]


def shares(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Seconds per reply of each part as shares of sampling's."""
    seconds = {each["case"]: each["result"]["seconds_a_reply"] for each in outcomes if "result" in each}
    return {name: own / seconds["sampling"] for name, own in seconds.items() if "sampling" in seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("output", type=Path, nargs="?", default=Path("verification.json"))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--seconds", type=float, default=420.0, help="in all (%(default)s)")
    options = parser.parse_args()
    # One at a time: others would be timed, too.
    outcomes = run_cases(cases_of(options.shape, options.parts), options.output, seconds=options.seconds)
    found = shares(outcomes)
    write(options.output, [*outcomes, {"case": "shares of sampling", "seconds": 0.0, "result": found}])
    rows = []
    for outcome in outcomes:
        for name, value in outcome.get("result", {}).items():
            if name.endswith("a_reply"):
                share = found.get(outcome["case"]) if name == "seconds_a_reply" else None
                rows.append([outcome["case"], name, value, share])
        if "error" in outcome:
            rows.append([outcome["case"], outcome["error"][:100], None, None])
    print(table(("part", "", "value", "share of sampling"), rows))


if __name__ == "__main__":
    main()
