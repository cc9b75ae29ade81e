"""Images through the inference server, with vLLM and with the embedded engine: how far the logprobs of sampled tokens
are from the trainer's, before and after a weight update in flight.

PYTHONPATH=src:benchmarks python -m gpu_parts.vision_serving results/vision_serving_h200.json
… --families qwen3_vl --engines vllm --dtypes float32 --beside 1        # some of it, also on a CPU

vLLM needs torchvision. Models are tiny and have random weights. Chat messages hold 0, 1 and 3 images as data URLs.
"""

import argparse
import asyncio
import io
import os
import tempfile
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch
from aiohttp import web
from PIL import Image
from torch import Tensor

from gpu_parts.cases import Case, Outcome, run_cases, table
from gpu_parts.families import copy_of
from gpu_parts.vision_models import CONFIGS, make_model, save_model, write_files
from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import FilesystemWeights, ModelSettings
from headway.core.images import RequestImage, TokenImages
from headway.core.messages import as_messages, image_part
from headway.core.protocol import GenerateRequest, GenerateResponse, SamplingParams
from headway.core.runs import RunPaths
from headway.inference.images import ServedImage
from headway.inference.serve import load_engine
from headway.inference.server import ServerContext, build_app
from headway.models.attention import PackedPlan
from headway.models.checkpoints.tensors import hf_tensors
from headway.models.packed import PackedTokens
from headway.models.vision.config import VisionConfig
from headway.models.vision.decoder import VisionLM
from headway.models.vision.inputs import image_tokens
from headway.rendering.load import load_renderer
from headway.transport.inference import InferenceClient
from headway.transport.weights import make_sender

ENGINES, DTYPES = ("vllm", "embedded"), ("bfloat16", "float32")
SIZES = [(31, 17), (50, 90), (23, 40)]
QUESTIONS: list[list[int]] = [[], [0], [1, 0, 2]]
"""Images of a prompt, by number."""
SEEDS, OUTPUT, LONG = 4, 32, 400
"""Replies to each question, their tokens, and the tokens of replies during which new weights come."""
COLUMNS = ("largest", "mean", "spread", "tokens")
ON_GPU = torch.cuda.is_available()
TOKEN = "secret"
IMAGES = {"limit_mm_per_prompt": {"image": 8, "video": 0}}
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}}
"""Decoding replays a CUDA graph, as it does by default; nothing is compiled, which would take a minute."""


def attempts(family: str, dtype: str, engine: str) -> list[list[Any]]:
    """Arguments of vLLM and variables of its environment, the most usual first. FlashAttention has neither float32 nor
    the images of Gemma 3, whose tokens see each other."""
    if engine != "vllm":
        return [[family, dtype, engine, {}, {}]]
    if not ON_GPU:
        return [[family, dtype, engine, IMAGES, {}]]
    backends = ["TRITON_ATTN", "FLEX_ATTENTION"]
    if dtype == "bfloat16" and family != "gemma3":
        backends = ["FLASH_ATTN", "TRITON_ATTN"]
    first, second = ({**IMAGES, "mm_encoder_attn_backend": "TORCH_SDPA", **_backend(name)} for name in backends)
    eager: dict[str, Any] = {"enforce_eager": True}
    if family == "qwen3_vl_moe":
        eager["enable_return_routed_experts"] = False
    older = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    tried: list[tuple[dict[str, Any], dict[str, str]]] = [
        (first | GRAPHS, {}),
        (first | eager, older),
        (second | eager, older),
    ]
    return [[family, dtype, engine, arguments, variables] for arguments, variables in tried]


def _backend(name: str) -> dict[str, Any]:
    return {"attention_config": {"backend": name}}


def serve(family: str, dtype: str, engine: str, arguments: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    """Differences of logprobs, by phase and kind."""
    os.environ.update({"VLLM_USE_FLASHINFER_SAMPLER": "0", **variables})
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_serve(family, dtype, engine, arguments, Path(folder)))


async def _serve(family: str, dtype: str, engine: str, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    device = "cuda" if ON_GPU else "cpu"
    hf = write_files(family, folder / "files")
    old, new = (make_model(hf, seed, device, getattr(torch, dtype)) for seed in (0, 1))
    save_model(old, family, folder / "files", folder / "model", released=engine == "vllm")
    asked = Asked(folder / "model")
    gaps: dict[str, Gaps] = {}
    async with serving(folder / "model", dtype, engine, arguments) as client:
        gaps["before"] = await ask_all(asked, client, old)
        more: dict[str, Any] = {}
        try:
            replies = await update_in_flight(asked, client, new, RunPaths(folder / "run"))
            gaps["until the update"] = asked.until_update(old, replies)
            gaps["after"] = await ask_all(asked, client, new)
            more["versions"] = [reply.choices[0].versions for reply in replies]
        except Exception as error:
            # What came before it is worth keeping.
            traceback.print_exc()
            more["update_error"] = f"{type(error).__name__}: {error}"[:1500]
    return {**more, "differences": {phase: found.summary() for phase, found in gaps.items()}}


async def update_in_flight(
    asked: "Asked", client: InferenceClient, model: VisionLM, run: RunPaths
) -> list[GenerateResponse]:
    """Bring new weights while replies are underway, and return these."""
    update = make_sender(FilesystemWeights(), run).publish(1, hf_tensors(model))
    running = [asyncio.create_task(client.generate(asked.request([1, 0, 2], LONG, seed))) for seed in range(4)]
    generated = (await client.state()).generated_tokens + 60
    while (await client.state()).generated_tokens < generated and not all(t.done() for t in running):  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    # They stay underway, however long the update takes.
    await client.pause("keep")
    try:
        await client.update_weights(update)
    finally:
        await client.resume()
    return await asyncio.gather(*running)


@asynccontextmanager
async def serving(folder: Path, dtype: Any, engine: Any, arguments: dict[str, Any]) -> AsyncIterator[InferenceClient]:
    settings = ServeSettings(
        model=ModelSettings(path=str(folder), dtype=dtype),
        inference=InferenceSettings(
            engine=engine,
            max_running=8,
            kv_memory_gb=1.0 if ON_GPU else None,
            threads=None if ON_GPU else 1,
            vllm=arguments,
        ),
        seq_len=1024,
    )
    served = await asyncio.to_thread(load_engine, settings, folder)
    await served.start()
    runner = web.AppRunner(build_app(ServerContext(load_renderer(folder), folder.name, TOKEN, served)))
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with InferenceClient(f"http://127.0.0.1:{runner.addresses[0][1]}", token=TOKEN) as client:
            yield client
    finally:
        await runner.cleanup()
        await served.close()


@dataclass
class Gaps:
    """Logprobs of an engine, and the trainer's of the same tokens, by kind."""

    of: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, kind: str, served: Sequence[float], expected: Tensor) -> None:
        self.of.setdefault(kind, []).append(torch.stack([torch.tensor(served), expected]))

    def summary(self) -> dict[str, dict[str, float]]:
        return {kind: _summary(*torch.cat(pairs, 1)) for kind, pairs in self.of.items()}


def _summary(served: Tensor, expected: Tensor) -> dict[str, float]:
    """`spread`: by how much logprobs vary, beside which differences are small or not."""
    if not len(served):
        return {"tokens": 0}
    gap = (served - expected).abs()
    own = {"largest": float(gap.max()), "mean": float(gap.mean())}
    return {**own, "spread": float(expected.std()), "tokens": len(served)}


class Asked:
    """Questions with images, and what the trainer's model says of the replies."""

    def __init__(self, folder: Path) -> None:
        self._renderer: Any = load_renderer(folder)

    def messages(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = [{"type": "text", "text": "Look at"}]
        for number in numbers:
            content += [image_part(picture(number)), {"type": "text", "text": "and then"}]
        return [{"role": "user", "content": content}]

    def request(self, numbers: Sequence[int], tokens: int, seed: int, **params: Any) -> GenerateRequest:
        messages = as_messages(self.messages(numbers))
        rendered = self._renderer.render(messages, generation_prompt=True)
        data = {image.digest: image.data for message in messages for image in message.images}
        images = [RequestImage(use.at, use.tokens, use.digest, data[use.digest]) for use in rendered.images]
        sampling = SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True, logprobs=0, **params)
        return GenerateRequest(list(rendered.token_ids), sampling_params=sampling, images=images)

    def expected(self, model: VisionLM, numbers: Sequence[int], reply: list[int], experts: Any = None) -> Tensor:
        """Logprobs of all tokens except the first."""
        request = self.request(numbers, 1, 0)
        images = [ServedImage(use, *self._renderer.reader.read(use.digest, use.data)) for use in request.images]
        return logprobs_of(model, request.token_ids + reply, images, experts)

    def until_update(self, model: VisionLM, replies: Sequence[GenerateResponse]) -> Gaps:
        """Compare the tokens of replies underway that version 0 sampled."""
        gaps = Gaps()
        for reply in replies:
            (choice,) = reply.choices
            count = sum(count for version, count in choice.versions if version == 0)
            assert choice.logprobs is not None
            served = [entry.logprob for entry in choice.logprobs.content]
            expected = self.expected(model, [1, 0, 2], choice.token_ids)[-len(served) :]
            gaps.add("all", served[:count], expected[:count])
        return gaps


def picture(number: int) -> bytes:
    width, height = SIZES[number % len(SIZES)]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


async def ask_all(asked: Asked, client: InferenceClient, model: VisionLM) -> Gaps:
    """Ask every question, some replies at once, and compare them with the model, and with it in float32."""
    gaps = Gaps()
    precise = None if model.head_weight().dtype == torch.float32 else copy_of(model, torch.float32, _device(model))
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        for numbers in QUESTIONS:
            replies = [_chat(session, client.base_url, asked.messages(numbers), seed) for seed in range(SEEDS)]
            for body in await asyncio.gather(*replies):
                _compare(gaps, asked, numbers, body, model, precise)
    numbers = QUESTIONS[-1]
    whole = await client.generate(asked.request(numbers, OUTPUT, 9, prompt_logprobs=0))
    _compare_whole(gaps, asked, numbers, whole, model)
    return gaps


def _compare(gaps: Gaps, asked: Asked, numbers: list[int], body: Any, model: VisionLM, precise: Any) -> None:
    (choice,) = body["choices"]
    tokens, served = choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
    if body["prompt_token_ids"] != asked.request(numbers, 1, 0).token_ids:
        raise RuntimeError("the server rendered the messages otherwise")
    expected = asked.expected(model, numbers, tokens)[-len(served) :]
    gaps.add("all", served, expected)
    gaps.add(f"{len(numbers)} images", served, expected)
    if precise is not None:
        exact = asked.expected(precise, numbers, tokens)[-len(served) :]
        gaps.add("to float32", served, exact)
        gaps.add("trainer to float32", expected.tolist(), exact)


def _compare_whole(gaps: Gaps, asked: Asked, numbers: list[int], reply: GenerateResponse, model: VisionLM) -> None:
    """The prompt's logprobs, and with experts the reply's where the trainer is given those that the engine chose."""
    (choice,) = reply.choices
    assert reply.prompt_logprobs is not None and choice.logprobs is not None
    prompt = [entry.logprob for entry in reply.prompt_logprobs[1:] if entry is not None]
    gaps.add("prompt", prompt, asked.expected(model, numbers, choice.token_ids)[: len(prompt)])
    if choice.routed_experts is not None:
        served = [entry.logprob for entry in choice.logprobs.content]
        chosen = torch.from_numpy(choice.routed_experts.array().astype("int64"))
        length = len(prompt) + 1 + len(served)
        # The last token was never run.
        missing = torch.full((length - len(chosen), *chosen.shape[1:]), -1)
        experts = torch.cat([chosen, missing])
        gaps.add("experts replayed", served, asked.expected(model, numbers, choice.token_ids, experts)[-len(served) :])


async def _chat(session: aiohttp.ClientSession, url: str, messages: list[dict[str, Any]], seed: int) -> Any:
    body = {
        "messages": messages,
        "max_tokens": OUTPUT,
        "seed": seed,
        "ignore_eos": True,
        "logprobs": True,
        "return_token_ids": True,
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        found = await reply.json()
        if reply.status != 200:
            raise RuntimeError(f"{reply.status}: {found}")
        return found


def logprobs_of(model: VisionLM, tokens: list[int], images: Sequence[ServedImage], experts: Tensor | None) -> Tensor:
    """Logprobs of a training pass over prompt and reply."""
    config, device = model.config, _device(model)
    assert isinstance(config, VisionConfig)

    def put(array: Any, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype, device=device)

    seen = None
    if images:
        parts = [(image.use.digest, image.grid, image.patches) for image in images]
        joined = TokenImages.of(parts, [(image.use.at, number) for number, image in enumerate(images)])
        seen = image_tokens(joined, [len(tokens)], config, put)
    ids, plan = torch.tensor(tokens, device=device), PackedPlan([len(tokens)], device)
    chosen = None if experts is None else experts.to(device)
    packed = PackedTokens(ids, plan.positions, plan, images=seen, routed_experts_TLk=chosen)
    with torch.no_grad():
        logprobs = torch.log_softmax(model.logits(model(packed).hidden_TD), -1)
    return logprobs[:-1].gather(1, ids[1:, None])[:, 0].float().cpu()


def _device(model: VisionLM) -> Any:
    return model.head_weight().device


def show(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for outcome in outcomes:
        if "error" in outcome:
            rows.append([outcome["case"], "", outcome["error"].splitlines()[0][:100], *[None] * len(COLUMNS)])
            continue
        if problem := outcome["result"].get("update_error"):
            rows.append([outcome["case"], "", f"update: {problem.splitlines()[0][:100]}", *[None] * len(COLUMNS)])
        used = outcome["arguments"][3].get("attention_config", {}).get("backend", "")
        for phase, kinds in outcome["result"]["differences"].items():
            for kind, found in kinds.items():
                rows.append([outcome["case"], used, f"{phase}: {kind}", *(found.get(name) for name in COLUMNS)])
    return table(("case", "attention", "logprobs", *COLUMNS), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--families", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--beside", type=int, default=5, help="cases at a time (%(default)s)")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of an attempt (%(default)s)")
    parser.add_argument("--seconds", type=float, default=540.0, help="in all (%(default)s)")
    options = parser.parse_args()
    cases = [
        Case(f"{engine} {family} {dtype}", "vision_serving", "serve", attempts(family, dtype, engine), options.limit)
        for engine in options.engines
        for dtype in options.dtypes
        for family in options.families
    ]
    print(show(run_cases(cases, options.output, beside=options.beside, seconds=options.seconds)))


if __name__ == "__main__":
    main()
