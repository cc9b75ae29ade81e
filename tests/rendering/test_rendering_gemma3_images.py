"""Conversations with images for Gemma 3: tokens and pixels are those of Hugging Face's processor."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemma3_tokens import SPECIAL, TEMPLATE, make_tokenizer
from PIL import Image

from headway.core.messages import Message, as_messages, image_part
from headway.rendering.load import load_renderer
from headway.rendering.vision import VisionRenderer

CONFIG = Path(__file__).parents[1] / "models" / "families" / "gemma3" / "images.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    path, tokenizer = tmp_path_factory.mktemp("gemma3"), make_tokenizer()
    hf = json.loads(CONFIG.read_text()) | {"image_token_index": tokenizer.token_to_id("<image_soft_token>")}
    del hf["images"]
    (path / "config.json").write_text(json.dumps(hf))
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<end_of_turn>"}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    Gemma3ImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(path)
    return path


def make_processor(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    special = {"boi_token": SPECIAL[4], "image_token": SPECIAL[5], "eoi_token": SPECIAL[6]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<bos>", extra_special_tokens=special
    )
    image_processor = Gemma3ImageProcessorPil.from_pretrained(folder)
    return Gemma3Processor(image_processor, tokenizer, chat_template=TEMPLATE, image_seq_length=4)


def drawn(number: int, size: tuple[int, int]) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


PICTURES = [drawn(0, (31, 7)), drawn(1, (16, 16)), drawn(2, (5, 40))]


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


CONVERSATIONS: dict[str, list[list[int | str]]] = {
    "no image": [["Hello?"]],
    "first": [[0, "what is this?"]],
    "last": [["what is this: ", 0]],
    "alone": [[1]],
    "neighbours": [["one", 0, 1, " and ", 2, "\n"]],
    "turns": [["look ", 0], ["a cat"], ["and", 2, 0, "?"]],
}
"""The parts of each message, of user and model in turn: texts, and numbers of images."""


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_tokens_and_pixels_are_those_of_hugging_face(name: str, folder: Path) -> None:
    theirs, pictures, ours = [], [], []
    for turn, parts in enumerate(CONVERSATIONS[name]):
        role = "assistant" if turn % 2 else "user"
        items = [text(part) if isinstance(part, str) else {"type": "image"} for part in parts]
        theirs.append({"role": role, "content": items})
        pictures += [PICTURES[part] for part in parts if isinstance(part, int)]
        sent = [text(part) if isinstance(part, str) else image_part(PICTURES[part]) for part in parts]
        ours += as_messages({"role": role, "content": sent})
    renderer, processor = load_renderer(folder), make_processor(folder)
    rendered = renderer.render(ours, generation_prompt=True)
    prompt = processor.apply_chat_template(theirs, tokenize=False, add_generation_prompt=True)
    shown = [Image.open(io.BytesIO(picture)) for picture in pictures] or None
    expected = processor(text=prompt, images=shown, add_special_tokens=False, return_tensors="np")
    assert rendered.token_ids == expected["input_ids"][0].tolist()
    kinds = np.zeros(len(rendered.token_ids), np.int64)
    for use in rendered.images:
        kinds[use.at : use.at + use.tokens] = 1
    assert kinds.tolist() == expected["token_type_ids"][0].tolist()
    assert isinstance(renderer, VisionRenderer)
    for use, picture, pixels in zip(rendered.images, pictures, expected.get("pixel_values", ()), strict=True):
        whole = renderer.reader.processor.pixels(*renderer.reader.read(use.digest, picture))
        assert np.array_equal(whole, pixels)


def test_a_conversation_with_images_is_extended(folder: Path) -> None:
    renderer = load_renderer(folder)
    history = as_messages({"role": "user", "content": [image_part(PICTURES[0]), text("what?")]})
    prompt = renderer.render(history, generation_prompt=True).token_ids
    reply = [*renderer.encode("a cat"), *renderer.stop_token_ids[:1]]
    more = as_messages({"role": "user", "content": [text("and"), image_part(PICTURES[1])]})
    answered = [*history, Message("assistant", "a cat")]
    added = renderer.extend([*prompt, *reply], more, reply=len(reply), history=answered)
    assert added is not None and len(added.images) == 1
    whole = renderer.render([*answered, *more], generation_prompt=True)
    assert [*prompt, *reply, *added.token_ids] == whole.token_ids


def test_a_mark_in_the_text_beside_an_image_is_refused(folder: Path) -> None:
    said = as_messages({"role": "user", "content": [image_part(PICTURES[0]), text("<image_soft_token>")]})
    with pytest.raises(ValueError, match="must not hold <image_soft_token>"):
        load_renderer(folder).render(said)
