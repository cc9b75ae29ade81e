"""Tokens per second of the embedded engine beside Hugging Face's generate and vLLM, on the same work in one run.

    python benchmarks/engine.py                          # the built-in tiny model, 64 sequences
    python benchmarks/engine.py --model FOLDER --device cuda --dtype bfloat16 --sequences 256 --output 512

Every engine samples at temperature 1 with the logprobs of what it sampled. Wall-clock tokens/s say what a user
gets; tokens per CPU second say what it costs, and hold also on a machine that others use. vLLM is measured where
it is installed.
"""

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import FilesystemWeights, ModelSettings, PlacementSettings
from headway.core.protocol import GenerateRequest, SamplingParams
from headway.core.runs import RunPaths
from headway.inference.embedded.load import load_service, pick_device, pick_dtype
from headway.inference.embedded.service import EmbeddedService
from headway.models.checkpoint import load_config
from headway.models.tiny import resolve_model
from headway.models.weights import hf_tensors
from headway.transport.weights import make_sender


@dataclass
class Measured:
    """`tokens` were sampled in `seconds`; `cpu_seconds` are those of all threads of this process."""

    name: str
    tokens: int
    seconds: float
    cpu_seconds: float
    start_seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_rate(self) -> float:
        return self.tokens / self.cpu_seconds


@dataclass
class Work:
    folder: Path
    device: torch.device
    dtype: torch.dtype
    sequences: int
    prompt: int
    output: int

    def prompts(self) -> list[list[int]]:
        vocab = load_config(self.folder).vocab_size
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, vocab, (self.sequences, self.prompt), generator=generator).tolist()


def best_of(repeats: int, name: str, tokens: int, start_seconds: float, run: Callable[[], None]) -> Measured:
    """The fastest of several runs, after one to warm up."""
    run()
    measured = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        measured.append(Measured(name, tokens, seconds, cpu_seconds, start_seconds))
    return min(measured, key=lambda m: m.seconds)


def headway(work: Work, repeats: int) -> tuple[Measured, dict[str, float]]:
    """The engine as the server uses it, and what weight updates cost while it is busy."""
    started = time.perf_counter()
    settings = ServeSettings(
        model=ModelSettings(path=str(work.folder), dtype=str(work.dtype).removeprefix("torch.")),
        placement=PlacementSettings(device=work.device.type),
        inference=InferenceSettings(max_running=work.sequences, prefix_cache=False, threads=torch.get_num_threads()),
        seq_len=work.prompt + work.output,
    )
    service = load_service(settings, work.folder)
    params = SamplingParams(max_tokens=work.output, ignore_eos=True)
    requests = [GenerateRequest(prompt, sampling_params=params) for prompt in work.prompts()]

    async def measure() -> tuple[Measured, dict[str, float]]:
        await service.start()
        start_seconds = time.perf_counter() - started

        async def run() -> None:
            await asyncio.gather(*(service.generate(request) for request in requests))

        loop = asyncio.get_running_loop()
        await run()
        runs = []
        for _ in range(repeats):
            wall, cpu = loop.time(), time.process_time()
            await run()
            seconds, cpu_seconds = loop.time() - wall, time.process_time() - cpu
            runs.append(Measured("headway", work.sequences * work.output, seconds, cpu_seconds, start_seconds))
        updates = await measure_updates(service, run)
        await service.close()
        return min(runs, key=lambda m: m.seconds), updates

    return asyncio.run(measure())


async def measure_updates(service: EmbeddedService, run: Callable[[], "asyncio.Future[None]"]) -> dict[str, float]:
    """Seconds that an update of all weights takes from disk, while requests are in flight."""
    with TemporaryDirectory() as folder:
        sender = make_sender(FilesystemWeights(keep_last=10), RunPaths(Path(folder)))
        tensors = list(hf_tensors(service._engine.model))
        updates = [sender.publish(version, iter(tensors)) for version in range(1, 6)]
        busy = asyncio.ensure_future(run())
        await asyncio.sleep(0.05)
        replies = [await service.update(update) for update in updates]
        await busy
    return {"seconds": min(reply.seconds for reply in replies), "bytes": float(replies[0].bytes)}


def hugging_face(work: Work, repeats: int) -> Measured:
    started = time.perf_counter()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=work.dtype).to(work.device).eval()
    ids = torch.tensor(work.prompts(), device=work.device)
    start_seconds = time.perf_counter() - started

    def run() -> None:
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=work.output,
                max_new_tokens=work.output,
                return_dict_in_generate=True,
                output_scores=True,
                pad_token_id=0,
            )
            # The logprobs of sampled tokens, which the other engines give too.
            scores = torch.stack(out.scores, 1).log_softmax(-1)
            scores.gather(2, out.sequences[:, work.prompt :, None]).tolist()

    return best_of(repeats, "Hugging Face generate", work.sequences * work.output, start_seconds, run)


def vllm(work: Work, repeats: int) -> Measured:
    started = time.perf_counter()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    engine = LLM(
        str(work.folder),
        dtype=str(work.dtype).removeprefix("torch."),
        max_num_seqs=work.sequences,
        max_model_len=work.prompt + work.output,
        enable_prefix_caching=False,
    )
    params = VllmParams(max_tokens=work.output, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts()]
    start_seconds = time.perf_counter() - started

    def run() -> None:
        engine.generate(prompts, params, use_tqdm=False)

    return best_of(repeats, "vLLM", work.sequences * work.output, start_seconds, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = pick_device(arguments.device)
    dtype = pick_dtype(arguments.dtype, device)
    folder = resolve_model(arguments.model)
    work = Work(folder, device, dtype, arguments.sequences, arguments.prompt, arguments.output)
    print(f"{arguments.model} on {device} ({platform.machine()}, {torch.get_num_threads()} threads), {dtype}")
    print(f"{work.sequences} sequences, {work.prompt} tokens in, {work.output} out")
    ours, updates = headway(work, arguments.repeats)
    results = [ours, hugging_face(work, arguments.repeats)]
    if importlib.util.find_spec("vllm"):
        results.append(vllm(work, arguments.repeats))
    report(results, updates)
    if arguments.json:
        rows = [asdict(result) | {"tokens_per_second": result.rate} for result in results]
        arguments.json.write_text(json.dumps({"results": rows, "update": updates}, indent=2))


def report(results: list[Measured], updates: dict[str, float]) -> None:
    ours = results[0]
    print(f"{'':24}{'tokens/s':>10}{'per CPU s':>11}{'start s':>9}{'ours is':>9}{'per CPU':>9}")
    for result in results:
        print(
            f"{result.name:24}{result.rate:10,.0f}{result.cpu_rate:11,.0f}{result.start_seconds:9.1f}"
            f"{ours.rate / result.rate:8.2f}x{ours.cpu_rate / result.cpu_rate:8.2f}x"
        )
    if len(results) == 2:
        print("vLLM is not installed here: not measured")
    print(f"weight update under load: {1000 * updates['seconds']:.1f} ms for {updates['bytes'] / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
