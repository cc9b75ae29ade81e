"""The engines that are compared, each in a process of its own with the settings that are best for it."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine_parts.work import Work

Measured = dict[str, float]


@dataclass(frozen=True)
class Contender:
    """`serve` sets an engine up and hands `answer` a function per question; `needs` must be importable."""

    name: str
    serve: Callable[[Work, "Talk"], None]
    needs: str
    environment: dict[str, str]


class Talk:
    """A contender's side of the pipe: says that it is ready, then answers until it is told to stop."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def answer(self, questions: dict[str, Callable[[], Any]]) -> None:
        self._pipe.send("ready")
        while (question := self._pipe.recv()) != "stop":
            self._pipe.send(questions[question]())


def timed(run: Callable[[], None]) -> Measured:
    """Seconds of one round by the clock, and of all threads of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}


def headway(work: Work, talk: Talk, compiled: bool = True) -> None:
    """The engine as the server uses it."""
    from headway.config.inference import InferenceSettings, ServeSettings
    from headway.config.shared import ModelSettings, PlacementSettings
    from headway.core.protocol import GenerateRequest, SamplingParams
    from headway.inference.embedded.load import load_service
    from headway.models.native import library

    settings = ServeSettings(
        model=ModelSettings(path=work.folder, dtype=work.dtype),
        placement=PlacementSettings(device=work.device),
        inference=InferenceSettings(max_running=work.sequences, prefix_cache=False, threads=work.threads),
        seq_len=work.prompt + work.output,
    )
    service = load_service(settings, Path(work.folder))
    if not compiled:
        library.disable()
    params = SamplingParams(max_tokens=work.output, ignore_eos=True)
    requests = [GenerateRequest(prompt, sampling_params=params) for prompt in work.prompts()]

    async def everything() -> None:
        await asyncio.gather(*(service.generate(request) for request in requests))

    with asyncio.Runner() as runner:
        runner.run(service.start())
        talk.answer(
            {
                "round": lambda: timed(lambda: runner.run(everything())),
                "update": lambda: runner.run(update_under_load(service, everything)),
            }
        )
        runner.run(service.close())


def headway_plain(work: Work, talk: Talk) -> None:
    headway(work, talk, compiled=False)


async def update_under_load(service: Any, everything: Callable[[], Any]) -> Measured:
    """What taking over all weights from disk costs while requests are in flight: seconds of the best, and bytes."""
    from headway.config.shared import FilesystemWeights
    from headway.core.runs import RunPaths
    from headway.models.weights import hf_tensors
    from headway.transport.weights import make_sender

    with TemporaryDirectory() as folder:
        sender = make_sender(FilesystemWeights(keep_last=10), RunPaths(Path(folder)))
        tensors = list(hf_tensors(service._engine.model))
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
    from vllm import LLM, SamplingParams

    engine = LLM(
        work.folder,
        dtype=work.dtype,
        max_num_seqs=work.sequences,
        max_model_len=work.prompt + work.output,
        enable_prefix_caching=False,
        enforce_eager=eager,
        # A GPU is shared by all contenders.
        **({"gpu_memory_utilization": 0.4} if work.device == "cuda" else {}),
    )
    params = SamplingParams(max_tokens=work.output, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts()]
    talk.answer({"round": lambda: timed(lambda: engine.generate(prompts, params, use_tqdm=False))})


def vllm_eager(work: Work, talk: Talk) -> None:
    vllm(work, talk, eager=True)


_VLLM = {
    # In one process, so that its CPU time can be read; a gigabyte holds the KV cache of this work many times.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

CONTENDERS = {
    "headway": Contender("headway", headway, "headway", {}),
    "headway-plain": Contender("headway, kernels not compiled", headway_plain, "headway", {}),
    "vllm": Contender("vLLM, compiled", vllm, "vllm", _VLLM),
    "vllm-eager": Contender("vLLM, eager", vllm_eager, "vllm", _VLLM | {"TORCHDYNAMO_DISABLE": "1"}),
    "hf": Contender("Hugging Face generate", hugging_face, "transformers", {}),
    "hf-tuned": Contender("Hugging Face generate, oneDNN off", hugging_face_tuned, "transformers", {}),
}


def contend(key: str, work: Work, pipe: Connection) -> None:
    """The main function of a contender's process."""
    contender = CONTENDERS[key]
    os.environ.update(contender.environment)
    contender.serve(work, Talk(pipe))
