"""A server of vLLM for each family of models that see, held to the training pass.

Run in a process of its own, whose PYTHONPATH has a torchvision where none is installed: it prints the largest
difference between logprobs for each of the questions asked.
"""

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from engine_common import publish
from gemma3_tokens import SPECIAL, TEMPLATE, make_tokenizer
from image_common import expected
from PIL import Image
from safetensors.torch import load_file, save_file
from vllm_here import DTYPE, KV_GB, ON_GPU, vllm_arguments

from headway.config.inference import InferenceSettings, ServeSettings
from headway.config.shared import ModelSettings
from headway.core.images import RequestImage
from headway.core.messages import as_messages, image_part
from headway.core.protocol import GenerateRequest, GenerateResponse, SamplingParams
from headway.inference.images import ServedImage
from headway.inference.serve import load_engine
from headway.inference.server import ServerContext, build_app
from headway.inference.vllm.updates.stager import INNER_TOWERS, INPUTS_FIRST, rename, swap_sides
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.registry import config_from_hf
from headway.models.tiny import IMAGE_PROCESSOR
from headway.models.tiny_tokenizer import VISION, save_tiny_tokenizer, tiny_tokenizer
from headway.models.vision.decoder import VisionLM
from headway.rendering.load import load_renderer
from headway.transport.inference import EngineError, InferenceClient

CASES = Path(__file__).parents[2] / "models" / "families"
SIZES: dict[str, Any] = {"hidden_size": 128, "max_position_embeddings": 512}
"""Over those of each family's case: vLLM's attention on CPUs wants heads of 32 numbers or more."""
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [6, 5, 5]}}
MORE: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": ROPE,
    "qwen3_vl": {**ROPE, "head_dim": 32},
    "qwen3_vl_moe": {**ROPE, "head_dim": 32, "moe_intermediate_size": 32},
    "gemma3": {"head_dim": 32, "sliding_window": 16, "rope_parameters": None},
}
PICTURE_SIZES = [(31, 17), (50, 90), (23, 40)]
MOST = 8
TOKEN = "secret"


def picture(number: int) -> bytes:
    width, height = PICTURE_SIZES[number % len(PICTURE_SIZES)]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def write_files(name: str, folder: Path) -> dict[str, Any]:
    """Write a tokenizer and an image processor; returns the model's config.json."""
    hf = json.loads((CASES / name / "images.json").read_text())
    del hf["images"]
    folder.mkdir(parents=True)
    if name == "gemma3":
        tokenizer = make_tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"))
        special = {"boi_token": SPECIAL[4], "image_token": SPECIAL[5], "eoi_token": SPECIAL[6]}
        marks = {"bos_token": "<bos>", "eos_token": "<end_of_turn>", "extra_special_tokens": special}
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **marks})
        )
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        processor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}}
        processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": 4}
        ids = dict(zip(("boi_token_index", "image_token_index", "eoi_token_index"), special.values(), strict=True))
        size = tokenizer.get_vocab_size()
    else:
        size, tokenizer = save_tiny_tokenizer(folder, vision=True), tiny_tokenizer(vision=True)
        processor = IMAGE_PROCESSOR | {"patch_size": 4, "merge_size": 2}
        names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
        ids = dict(zip(names, VISION, strict=True))
        hf["vision_config"]["out_hidden_size"] = SIZES["hidden_size"]
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    hf |= {key: tokenizer.token_to_id(mark) for key, mark in ids.items()}
    hf["text_config"] |= {**SIZES, **MORE[name], "vocab_size": size, "bos_token_id": None, "eos_token_id": None}
    return hf


def make_model(hf: dict[str, Any], seed: int) -> VisionLM:
    """Random weights, large enough that replies depend visibly on what images show."""
    model = build_model(config_from_hf(hf), seed=seed)
    assert isinstance(model, VisionLM)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2).add_(0.05 * torch.randn(parameter.shape, generator=draw))
    return model


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[InferenceClient]:
    settings = ServeSettings(
        model=ModelSettings(path=str(folder), dtype=DTYPE),
        inference=InferenceSettings(
            engine="vllm",
            threads=1,
            max_running=2,
            kv_memory_gb=KV_GB if ON_GPU else None,
            vllm=vllm_arguments(limit_mm_per_prompt={"image": MOST, "video": 0}),
        ),
        seq_len=512,
    )
    engine = await asyncio.to_thread(load_engine, settings, folder)
    await engine.start()
    runner = web.AppRunner(build_app(ServerContext(load_renderer(folder), folder.name, TOKEN, engine)))
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with InferenceClient(f"http://127.0.0.1:{runner.addresses[0][1]}", token=TOKEN) as client:
            yield client
    finally:
        await runner.cleanup()
        await engine.close()


def as_released(family: str, folder: Path) -> None:
    """Rewrite a checkpoint with the inputs of experts before their outputs, and names as released ones have them."""
    (file,) = folder.glob("*.safetensors")
    tensors = {rename(name, INNER_TOWERS.get(family)): tensor for name, tensor in load_file(file).items()}
    if family in INPUTS_FIRST:
        tensors = {name: swap_sides(name, tensor) for name, tensor in tensors.items()}
    save_file(tensors, file, {"format": "pt"})


class Questions:
    """Prompts with images, and what the trainer says of the replies."""

    def __init__(self, folder: Path) -> None:
        self._renderer: Any = load_renderer(folder)

    def request(self, numbers: list[int], **params: Any) -> GenerateRequest:
        content: list[Any] = [{"type": "text", "text": "Look at"}]
        for number in numbers:
            content += [image_part(picture(number)), {"type": "text", "text": "and then"}]
        messages = as_messages([{"role": "user", "content": content}])
        rendered = self._renderer.render(messages, generation_prompt=True)
        data = {image.digest: image.data for message in messages for image in message.images}
        images = [RequestImage(use.at, use.tokens, use.digest, data[use.digest]) for use in rendered.images]
        sampling = SamplingParams(**{"max_tokens": 8, "seed": 1, "ignore_eos": True, "logprobs": 0} | params)
        return GenerateRequest(list(rendered.token_ids), sampling_params=sampling, images=images)

    def difference(self, model: VisionLM, request: GenerateRequest, reply: GenerateResponse) -> float:
        """The largest between logprobs of the reply, and of the prompt where these were asked for."""
        images = tuple(ServedImage(use, *self._renderer.reader.read(use.digest, use.data)) for use in request.images)
        (choice,) = reply.choices
        assert choice.logprobs is not None
        wanted = expected(model, request.token_ids + choice.token_ids, images)
        scores = [*(reply.prompt_logprobs or [])[1:], *choice.logprobs.content]
        served = [score.logprob for score in scores if score]
        return float((torch.tensor(served) - wanted[-len(served) :]).abs().max())


async def ask(name: str, folder: Path) -> dict[str, float]:
    hf = write_files(name, folder / "files")
    model = make_model(hf, 0)
    save_checkpoint(model, folder / "model", files_from=folder / "files")
    as_released(name, folder / "model")
    questions = Questions(folder / "model")
    found: dict[str, float] = {}
    async with serving(folder / "model") as client:

        async def compare(label: str, weights: VisionLM, *numbers: int, **params: Any) -> None:
            request = questions.request(list(numbers), **params)
            found[label] = questions.difference(weights, request, await client.generate(request))

        await compare("several", model, 0, 1, 0, 2, prompt_logprobs=0)
        await compare("cached", model, 0, 1, 0, 2)
        await compare("other image of the size", model, 3, 1, 0, 2)
        await compare("text", model, prompt_logprobs=0)
        tower = make_model(hf, 0)
        tower.tower.load_state_dict(make_model(hf, 1).tower.state_dict())
        update = publish(folder / "updates", 1, tower)
        running = [
            asyncio.create_task(client.generate(questions.request([0, 1, 0, 2], max_tokens=300, seed=seed)))
            for seed in range(4)
        ]
        while (await client.state()).generated_tokens < 60:  # noqa: ASYNC110 (another process generates)
            await asyncio.sleep(0.01)
        # Two run and two wait, however long the update takes.
        await client.pause("keep")
        await client.update_weights(update)
        await client.resume()
        await compare("new tower", tower, 0, 1, 0, 2, prompt_logprobs=0)
        await compare("new tower, cached", tower, 0, 1, 0, 2)
        replies = await asyncio.gather(*running)
        versions = [[version for version, _ in reply.choices[0].versions] for reply in replies]
        assert sorted(versions) == [[0, 1], [0, 1], [1], [1]]
        late = [reply for reply, sampled in zip(replies, versions, strict=True) if sampled == [1]]
        prompt = questions.request([0, 1, 0, 2])
        found["late"] = max(questions.difference(tower, prompt, reply) for reply in late)
        newer = make_model(hf, 2)
        await client.update_weights(publish(folder / "updates", 2, newer))
        await compare("all new", newer, 2, 0, prompt_logprobs=0)
        with pytest.raises(EngineError, match=f"at most {MOST}") as refused:
            await client.generate(questions.request([0] * (MOST + 1)))
        assert refused.value.status == 400
    return found


if __name__ == "__main__":
    for case in sys.argv[2:]:
        print(json.dumps({case: asyncio.run(ask(case, Path(sys.argv[1]) / case))}), flush=True)
