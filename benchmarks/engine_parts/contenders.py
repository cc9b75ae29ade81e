"""The engines that are compared, each in a process of its own with the settings that are best for it."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from engine_parts.work import Work

Measured = dict[str, float]


@dataclass(frozen=True)
class Contender:
    """`serve` sets an engine up and hands `answer` a function per question; `needs` must be importable."""

    name: str
    serve: Callable[[Work, "Talk"], None]
    needs: str


class Talk:
    """A contender's side of the pipe: says since when it is ready, then answers until it is told to stop."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def answer(self, questions: dict[str, Callable[[], Any]]) -> None:
        self._pipe.send(time.time())
        while (question := self._pipe.recv()) != "stop":
            self._pipe.send(questions[question]())


def timed(run: Callable[[], None]) -> Measured:
    """Seconds of one round by the clock, and of all threads of this process and of those that it has started."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    run()
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": cpu_seconds() - cpu}


def cpu_seconds() -> float:
    children = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(times.user + times.system for times in children)


def headway(work: Work, talk: Talk) -> None:
    """The embedded engine as the server uses it."""
    from headway.inference.embedded.load import load_service

    serve(load_service(settings_of(work), Path(work.folder)), work, talk)


def headway_plain(work: Work, talk: Talk) -> None:
    from headway.inference.embedded.load import load_service
    from headway.models.ops import registry

    service = load_service(settings_of(work), Path(work.folder))
    registry.disable("c")
    serve(service, work, talk)


def headway_vllm(work: Work, talk: Talk) -> None:
    """vLLM as the server uses it: with versions, logprobs after all filters, and updates."""
    from headway.inference.vllm.load import load_vllm

    serve(load_vllm(settings_of(work), Path(work.folder)), work, talk)


def settings_of(work: Work) -> Any:
    from headway.config.inference import InferenceSettings, ServeSettings
    from headway.config.shared import ModelSettings, PlacementSettings

    # All contenders share a GPU, so they are told how much of it is theirs.
    kv_memory_gb = kv_bytes(work) / 1e9 if work.device == "cuda" else None
    return ServeSettings(
        model=ModelSettings(path=work.folder, dtype=work.dtype),
        placement=PlacementSettings(device=work.device),
        inference=InferenceSettings(
            max_running=work.sequences, prefix_cache=False, threads=work.threads, kv_memory_gb=kv_memory_gb
        ),
        seq_len=work.prompt + work.output,
    )


def serve(service: Any, work: Work, talk: Talk) -> None:
    """Answer with an engine of ours, by its own interface."""
    from headway.core.protocol import GenerateRequest, SamplingParams

    params = SamplingParams(max_tokens=work.output, ignore_eos=True)
    requests = [GenerateRequest(prompt, sampling_params=params) for prompt in work.prompts()]

    async def everything() -> None:
        await asyncio.gather(*(service.generate(request) for request in requests))

    with asyncio.Runner() as runner:
        runner.run(service.start())
        talk.answer(
            {
                "round": lambda: timed(lambda: runner.run(everything())),
                "update": lambda: runner.run(update_under_load(service, Path(work.folder), everything)),
            }
        )
        runner.run(service.close())


async def update_under_load(service: Any, checkpoint: Path, everything: Callable[[], Any]) -> Measured:
    """What taking over all weights from disk costs while requests are in flight: seconds of the best, and bytes."""
    from headway.config.shared import FilesystemWeights
    from headway.core.runs import RunPaths
    from headway.models.checkpoints.folders import read_tensors
    from headway.transport.weights import make_sender

    with TemporaryDirectory() as folder:
        sender = make_sender(FilesystemWeights(keep_last=10), RunPaths(Path(folder)))
        tensors = list(read_tensors(checkpoint))
        large = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors) > 1e9
        updates = [sender.publish(version, iter(tensors)) for version in range(1, 3 if large else 6)]
        busy = asyncio.ensure_future(everything())
        await asyncio.sleep(0.05)
        replies = [await service.update(update) for update in updates]
        await busy
    return {"seconds": min(reply.seconds for reply in replies), "bytes": float(replies[0].bytes)}


def hugging_face(work: Work, talk: Talk, tuned: bool = False) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(work.threads)
    if tuned:
        torch.backends.mkldnn.set_flags(False)
    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=getattr(torch, work.dtype)).to(work.device).eval()
    ids = torch.tensor(work.prompts(), device=work.device)

    def everything() -> None:
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

    talk.answer({"round": lambda: timed(everything)})


def hugging_face_tuned(work: Work, talk: Talk) -> None:
    hugging_face(work, talk, tuned=True)


def vllm(work: Work, talk: Talk, eager: bool = False) -> None:
    os.environ.update(vllm_environment(work))
    from vllm import LLM, SamplingParams

    engine = LLM(
        work.folder,
        dtype=work.dtype,
        max_num_seqs=work.sequences,
        max_model_len=work.prompt + work.output,
        enable_prefix_caching=False,
        enforce_eager=eager,
        **shared(work),
    )
    params = SamplingParams(max_tokens=work.output, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts()]
    talk.answer({"round": lambda: timed(lambda: engine.generate(prompts, params, use_tqdm=False))})


def shared(work: Work) -> dict[str, Any]:
    """vLLM's arguments for a GPU that it does not have to itself."""
    return {"kv_cache_memory_bytes": kv_bytes(work), "gpu_memory_utilization": 0.1} if work.device == "cuda" else {}


def kv_bytes(work: Work) -> int:
    """Keys and values of all sequences, and of one more for what an engine keeps to itself."""
    from headway.inference.vllm.arguments import read_config

    per_token = read_config(Path(work.folder)).kv_numbers_per_token * {"float32": 4, "bfloat16": 2}[work.dtype]
    return (work.sequences + 1) * (work.prompt + work.output) * per_token


def vllm_eager(work: Work, talk: Talk) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    vllm(work, talk, eager=True)


def vllm_environment(work: Work) -> dict[str, str]:
    if work.device == "cuda":
        # vLLM takes it for granted where it is not told.
        return {} if find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    # In one process: a hop less for every step. A gigabyte holds the KV cache of this work many times.
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


CONTENDERS = {
    "headway": Contender("headway", headway, "headway"),
    "headway-plain": Contender("headway, kernels not compiled", headway_plain, "headway"),
    "headway-vllm": Contender("headway, vLLM as its engine", headway_vllm, "vllm"),
    "vllm": Contender("vLLM, compiled", vllm, "vllm"),
    "vllm-eager": Contender("vLLM, eager", vllm_eager, "vllm"),
    "hf": Contender("Hugging Face generate", hugging_face, "transformers"),
    "hf-tuned": Contender("Hugging Face generate, oneDNN off", hugging_face_tuned, "transformers"),
}
ON_CPU = list(CONTENDERS)
ON_CUDA = ["headway", "headway-vllm", "vllm"]
"""Without variants that differ on CPU alone, and without generate, which keeps the scores of all tokens: 80 GB of them
for 256 replies of 512 tokens."""


def contend(key: str, work: Work, pipe: Connection) -> None:
    """The main function of a contender's process."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    CONTENDERS[key].serve(work, Talk(pipe))
