"""Proofs of activations on one GPU: one engine proves, the other and it itself check, by the swarm's own check.

PYTHONPATH=src:benchmarks python -m gpu_parts.proofs results/proofs_h200.json
… --cases "embedded float32" "vllm float32"                             # some of it, on a CPU with a tiny model

Weights are random, in the shape of Qwen3-0.6B. Workers are honest, or sample and prove with other weights: a step of
Adam older, with noise, in int8, or another model. The trusted side is `rescore_all`; engines are also asked for all
numbers of the states, and so judge in its place.
"""

import argparse
import asyncio
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_parts.work import SHAPES
from gpu_parts.cases import Case, Outcome, run_cases, scratch_folder, table
from gpu_parts.families import copy_of
from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import FilesystemWeights, ModelSettings
from headway.core.activations import Places
from headway.core.episodes import Episode, Node, Task, Trace
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.core.runs import RunPaths
from headway.inference.engine import Engine
from headway.inference.serve import load_engine
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.checkpoints.tensors import hf_tensors
from headway.models.configs.config import ModelConfig
from headway.models.decoder import DecoderLM
from headway.models.tiny import resolve_model
from headway.swarm.messages.orders import Contribution, Precision, WorkOrder
from headway.swarm.messages.proofs import proven_positions
from headway.swarm.messages.replies import reply_branches
from headway.swarm.trust.checks.activations import ACTIVATION_BOUNDS, Activations, claimed_states, compare
from headway.swarm.trust.checks.base import Check, Evidence
from headway.swarm.trust.checks.numbers import Logprobs, Ranks, SeededDraws
from headway.swarm.trust.rescore import rescore_all
from headway.swarm.trust.rescored import Rescored, States
from headway.swarm.work.prove import prove
from headway.transport.weights import make_sender

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SMALL = ModelConfig("qwen3", 512, 128, 2, 4, 2, 32, 256, tied=True, max_len=1024)
SHAPE = replace(SHAPES["qwen3-0.6b"], max_len=1024) if ON_GPU else SMALL
GROUP, PROMPT, OUTPUT = (16, 64, 256) if ON_GPU else (2, 16, 40)
SEEDS = tuple(range(100, 100 + GROUP))
SAMPLING = SamplingParams(max_tokens=OUTPUT)
CHECKS: tuple[Check[Evidence], ...] = (Logprobs(), SeededDraws(), Ranks(), Activations())
KINDS = ("honest", "older 1e-6", "older 1e-5", "noise 1e-3", "int8", "other model")
"""Weights of a worker; the numbers are a learning rate, and a share of each weight."""
CASES = ("embedded bfloat16", "embedded float32", "vllm bfloat16", "vllm float32")
Row = dict[str, Any]


def attempts(engine: str, precision: str) -> list[list[Any]]:
    """Arguments of vLLM, the most usual first. The last ones draw with vLLM's own seeds, which no check knows."""
    if engine != "vllm" or not ON_GPU:
        return [[engine, precision, {}]]
    first, second = ("FLASH_ATTN", "TRITON_ATTN") if precision == "bfloat16" else ("TRITON_ATTN", "FLEX_ATTENTION")
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [GROUP]}
    return [
        [engine, precision, {"attention_config": {"backend": first}, "compilation_config": graphs}],
        [engine, precision, {"attention_config": {"backend": first}, "enforce_eager": True}],
        [
            engine,
            precision,
            {"attention_config": {"backend": second}, "enforce_eager": True, "logits_processors": None},
        ],
    ]


def measure(engine: str, precision: Precision, arguments: dict[str, Any]) -> list[Row]:
    """A row for each kind of worker and each side that checks it."""
    # Its other model runner shows no states; see `internals.watch_head`.
    os.environ.update({"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"})
    with tempfile.TemporaryDirectory(dir=scratch_folder(24)) as folder:
        return asyncio.run(Trial(engine, precision, arguments, Path(folder)).run())


class Trial:
    """Workers with one engine, and both sides that check them."""

    def __init__(self, engine: str, precision: Precision, arguments: dict[str, Any], folder: Path) -> None:
        self._name, self._precision, self._folder = engine, precision, folder
        self._arguments = arguments
        # In the precision of a trainer's own copy, from which steps are made.
        self._master = build_model(SHAPE, device=DEVICE, dtype=torch.float32, seed=0)
        self._trusted = self._weights("honest")
        self._sender = make_sender(FilesystemWeights(), RunPaths(folder / "run"))
        self._version = 0
        self.rows: list[Row] = []

    async def run(self) -> list[Row]:
        save_checkpoint(self._trusted, self._folder / "model", files_from=resolve_model("tiny"))
        engine = await asyncio.to_thread(load_engine, self._settings(self._name), self._folder / "model")
        await engine.start()
        try:
            await self._judge_all(engine)
        finally:
            await engine.close()
        return self.rows

    async def _judge_all(self, engine: Engine) -> None:
        made: dict[str, Contribution] = {}
        for kind in KINDS:
            try:
                await self._serve(engine, kind)
                made[kind], seconds = await self._contribute(engine)
                again = rescore_all(self._trusted, _traces(made[kind]), 1.0)
                self._note(kind, "trusted", made[kind], again, seconds)
            except Exception as error:
                self._failed(kind, "trusted", error)
        await self._serve(engine, "honest")
        for kind, contribution in made.items():
            try:
                # Alone, where the proof was made with the group: other shapes round otherwise.
                states = await all_states(engine, contribution)
                again = rescore_all(self._trusted, _traces(contribution), 1.0)
                self._note(kind, f"{self._name} itself", contribution, replace(again, states_PD=states))
            except Exception as error:
                self._failed(kind, f"{self._name} itself", error)
        if self._name == "vllm":
            await self._judge_embedded(engine)

    async def _judge_embedded(self, engine: Engine) -> None:
        """Let vLLM judge what the embedded engine proves."""
        other = await asyncio.to_thread(load_engine, self._settings("embedded"), self._folder / "model")
        await other.start()
        try:
            for kind in ("honest", "other model"):
                await self._serve(other, kind)
                contribution, _ = await self._contribute(other)
                again = rescore_all(self._trusted, _traces(contribution), 1.0)
                states = await all_states(engine, contribution)
                self._note(kind, "vllm", contribution, replace(again, states_PD=states), prover="embedded")
        except Exception as error:
            self._failed("", "vllm", error)
        finally:
            await other.close()

    def _settings(self, engine: Any) -> ServeSettings:
        own: dict[str, Any] = {}
        if engine == "vllm":
            from headway.inference.vllm.arguments import SEEDED_SAMPLER

            own = {"logits_processors": [SEEDED_SAMPLER], **self._arguments}
        return ServeSettings(
            model=ModelSettings(path=str(self._folder / "model"), dtype=self._precision),
            inference=InferenceSettings(
                engine=engine,
                max_running=GROUP,
                kv_memory_gb=8.0 if ON_GPU else 0.2,
                threads=None if ON_GPU else 1,
                vllm=own,
            ),
            seq_len=PROMPT + OUTPUT + 16,
        )

    async def _serve(self, engine: Engine, kind: str) -> None:
        """Bring the weights of a kind of worker."""
        self._version += 1
        weights = self._trusted if kind == "honest" else self._weights(kind)
        update = await asyncio.to_thread(self._sender.publish, self._version, hf_tensors(weights))
        await engine.update(update)

    @torch.no_grad()
    def _weights(self, kind: str) -> DecoderLM:
        """The weights of a kind of worker, in the precision that it computes in."""
        dtype = getattr(torch, self._precision)
        if kind == "other model":
            return build_model(SHAPE, device=DEVICE, dtype=dtype, seed=1).eval()
        if kind == "honest":
            return copy_of(self._master, dtype, DEVICE)
        model = copy_of(self._master, torch.float32, DEVICE)
        draw = torch.Generator(DEVICE).manual_seed(7)
        name, _, size = kind.partition(" ")
        for weight in model.parameters():
            if name == "int8":
                _round_rows(weight)
                continue
            noise = torch.randn(weight.shape, generator=draw, device=DEVICE)
            weight += float(size) * (noise.sign() if name == "older" else noise * weight)
        return copy_of(model, dtype, DEVICE)

    async def _contribute(self, engine: Engine) -> tuple[Contribution, dict[str, float]]:
        """Sample the replies of an order and prove them; also seconds that both took, per reply."""
        began = time.perf_counter()
        prompts = [[(31 * i * i + 17 * j + i) % SHAPE.vocab_size for i in range(PROMPT)] for j in range(GROUP)]
        asked = [
            engine.generate(GenerateRequest(tokens, sampling_params=sampling(seed)))
            for tokens, seed in zip(prompts, SEEDS, strict=True)
        ]
        results = await asyncio.gather(*asked)
        sampled = time.perf_counter()
        episodes = []
        for number, (tokens, result) in enumerate(zip(prompts, results, strict=True)):
            (choice,) = result.choices
            trace = Trace(nodes=[Node(-1, tokens), Node(0, choice.token_ids, logprobs=choice.logprobs)])
            episodes.append(Episode(str(number), "group", "env", Task("task"), traces=[trace]))
        contribution = Contribution("order", self._precision, episodes)
        contribution.proofs = await prove(episodes, engine.top_states, SHAPE.width)
        seconds = {
            "sampling_seconds": (sampled - began) / GROUP,
            "proving_seconds": (time.perf_counter() - sampled) / GROUP,
        }
        return contribution, seconds

    def _note(
        self,
        kind: str,
        checker: str,
        contribution: Contribution,
        rescored: Rescored,
        more: dict[str, float] | None = None,
        prover: str | None = None,
    ) -> None:
        states_PD = rescored.states_PD
        errors, overlaps = compare(claimed_states(contribution, states_PD.shape[1]), states_PD)
        evidence = Evidence(ORDER, contribution, contribution.episodes, rescored)
        gaps = np.abs(rescored.claimed - rescored.logprobs)
        bounds = ACTIVATION_BOUNDS[self._precision]
        self.rows.append(
            {
                "prover": prover or self._name,
                "checker": checker,
                "precision": self._precision,
                "weights": kind,
                "states": len(errors),
                "mean": float(errors.mean()),
                "largest": float(errors.max()),
                "overlap": float(overlaps.mean()),
                "bounds": {"mean": bounds.mean, "largest": bounds.largest, "overlap": bounds.overlap},
                "refused": Activations().refuse(evidence) is not None,
                "refused_by": {check.name: reason for check in CHECKS if (reason := check.refuse(evidence))},
                "logprobs_mean": float(gaps.mean()),
                "logprobs_largest": float(gaps.max()),
                "missed_mean": float(rescored.missed.mean()),
                "missed_largest": float(rescored.missed.max()),
                **(more or {}),
            }
        )
        print(self.rows[-1], flush=True)

    def _failed(self, kind: str, checker: str, error: Exception) -> None:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"[:1500]
        own = {"prover": self._name, "precision": self._precision, "weights": kind, "checker": checker}
        self.rows.append({**own, "error": text, "traceback": traceback.format_exc()[-1500:]})


ORDER = WorkOrder("run", b"", "env", 0, "", 0, Task("task"), SEEDS, SAMPLING, PROMPT + OUTPUT)


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=OUTPUT, seed=seed, ignore_eos=True)


def _traces(contribution: Contribution) -> list[tuple[Trace, int]]:
    return [(episode.traces[0], seed) for episode, seed in zip(contribution.episodes, SEEDS, strict=True)]


async def all_states(engine: Engine, contribution: Contribution) -> States:
    """Ask an engine for whole states at the places that are proven, one reply at a time."""
    parts = []
    for episode in contribution.episodes:
        for branch in reply_branches(episode.traces[0]):
            places = Places(branch.token_ids, proven_positions(branch.replies))
            (found,) = await engine.top_states([places], SHAPE.width)
            states_PD = np.zeros((len(places.positions), SHAPE.width), dtype=np.float32)
            np.put_along_axis(states_PD, found.indices_PK, found.values_PK, axis=1)
            parts.append(states_PD)
    return np.concatenate(parts)


def _round_rows(weight: torch.Tensor) -> None:
    """Round a matrix to 8 bits, with a scale for each row."""
    if weight.dim() == 2:
        scale = weight.abs().amax(1, keepdim=True) / 127
        weight.copy_((weight / scale).round() * scale)


def show(outcomes: Sequence[Outcome]) -> str:
    head = ("prover", "checker", "precision", "weights", "mean", "largest", "overlap", "refused", "by", "proving s")
    rows: list[list[Any]] = []
    for outcome in outcomes:
        if "error" in outcome:
            rows.append([outcome["case"], outcome["error"][:60], *[None] * (len(head) - 2)])
        for row in outcome.get("result", ()):
            own = [row[name] for name in head[:4]]
            if "error" in row:
                rows.append([*own, row["error"][:60], *[None] * (len(head) - 5)])
                continue
            numbers = [row[name] for name in ("mean", "largest", "overlap", "refused")]
            rows.append([*own, *numbers, "+".join(row["refused_by"]), row.get("proving_seconds")])
    bounds = [f"{name}: {own.mean} mean, {own.largest} largest" for name, own in ACTIVATION_BOUNDS.items()]
    return table(head, rows) + "\nbounds: " + "; ".join(bounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--beside", type=int, default=4, help="cases at a time (%(default)s)")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of an attempt (%(default)s)")
    parser.add_argument("--seconds", type=float, default=540.0, help="in all (%(default)s)")
    options = parser.parse_args()
    cases = [Case(name, "proofs", "measure", attempts(*name.split()), options.limit) for name in options.cases]
    print(show(run_cases(cases, options.output, beside=options.beside, seconds=options.seconds)))


if __name__ == "__main__":
    main()
