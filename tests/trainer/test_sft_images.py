"""Supervised rows with images: packed, they give the loss and the gradients that transformers gives each alone."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from trainer_helpers import small_settings

from headway.base.errors import HeadwayError
from headway.core.batches import ComponentCounts
from headway.core.image_files import ImageFiles
from headway.core.images import MOST_IMAGE_BYTES, MOST_IMAGES
from headway.core.messages import image_part
from headway.core.rows import read_rows
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.images.reader import file_reader
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.models.vision.config import VisionConfig
from headway.rendering.base import Renderer
from headway.rendering.load import load_renderer
from headway.trainer.data.packing import counts_of, micro_batches
from headway.trainer.data.rows import TokenRows, tokenize_rows
from headway.trainer.parallel.ranks import joined
from headway.trainer.state import build_state
from headway.trainer.step import Stepper

SIZES = [[(16, 16)], [], [(24, 16), (40, 32), (16, 16)], [(64, 8)]]
"""Width and height of the images of each row; equal sizes are the same image."""


def draw(size: tuple[int, int]) -> bytes:
    noise = np.random.default_rng(size).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that sees, with weights so large that what images show is visible in the loss."""
    built_in = resolve_model("tiny-vl")
    model = build_model(load_config(built_in), seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    made = tmp_path_factory.mktemp("model") / "tiny-vl"
    save_checkpoint(model, made, files_from=built_in)
    return made


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def chat(*content: dict[str, Any], answer: str = "yes") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}, {"role": "assistant", "content": answer}]}


def write_rows(data: Path) -> str:
    """Rows whose first images are files beside them, and whose others are data URLs."""
    (data / "pictures").mkdir()
    rows = []
    for number, sizes in enumerate(SIZES):
        parts = []
        for place, size in enumerate(sizes):
            parts += [image_part(draw(size)), text_part("and ")]
            if not place:
                name = f"pictures/{number}.png"
                (data / name).write_bytes(draw(size))
                parts[0] = {"type": "image_url", "image_url": {"url": name}}
        rows.append(chat(*parts, text_part("ab?"), answer="yes" * (number + 1)))
    path = data / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: str, renderer: Renderer, files: ImageFiles, seq_len: int = 512, **options: Any) -> TokenRows:
    rows = read_rows(path)
    return tokenize_rows(rows, renderer, seq_len=seq_len, train_roles=["assistant"], images=files, **options)[0]


def reference_loss(folder: Path, rows: TokenRows) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and gradients of transformers' model, with patches of transformers' processor, row by row."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    total = torch.zeros(())
    for row, sizes in enumerate(SIZES):
        span = slice(int(rows.starts[row]), int(rows.starts[row + 1]))
        ids, learned = torch.from_numpy(rows.token_ids[span]).long(), torch.from_numpy(rows.learned[span])
        seen: dict[str, torch.Tensor] = {}
        if sizes:
            pixels = processor([Image.open(io.BytesIO(draw(size))) for size in sizes], return_tensors="pt")
            kinds = (ids == model.config.image_token_id).int()[None]
            seen = {**pixels, "mm_token_type_ids": kinds}
        logits = model(input_ids=ids[None], **seen).logits[0]
        total = total + F.cross_entropy(logits[:-1], ids[1:], reduction="none")[learned[1:]].sum()
    loss = total / int(rows.learned.sum())
    loss.backward()
    found = {name.replace("language_model.", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


def test_packed_rows_give_the_loss_and_gradients_of_rows_alone(folder: Path, tmp_path: Path) -> None:
    files = ImageFiles(tmp_path / "images")
    rows = read(write_rows(tmp_path), load_renderer(folder), files)
    every = np.arange(len(rows))
    counts = counts_of(rows, every)
    micros = list(micro_batches(rows, every, 512, 0, 1, file_reader(files, folder)))
    assert len(micros) == 1 and micros[0].images is not None and len(micros[0].images.digests) == 4
    assert len(list((tmp_path / "images").iterdir())) == 4
    settings = small_settings(model__path=str(folder), model__vision_tower="trained")
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        sums = Stepper(settings, ranks)._accumulate(state, micros, counts)
    loss, expected = reference_loss(folder, rows)
    assert abs(sums.values["loss"].item() - loss) < 1e-4
    gradients = {name: parameter.grad for name, parameter in state.trained()}
    assert gradients.keys() == expected.keys() and any(name.startswith("model.visual.") for name in gradients)
    for name, grad in gradients.items():
        assert grad is not None and (grad - expected[name]).norm() <= 1e-4 * expected[name].norm() + 1e-6, name
    assert counts == ComponentCounts(ce=int(rows.learned.sum()))


def test_rows_survive_their_file_and_cuts_leave_images_whole(folder: Path, tmp_path: Path) -> None:
    files, renderer = ImageFiles(tmp_path / "images"), load_renderer(folder)
    path = write_rows(tmp_path)
    rows = read(path, renderer, files)
    rows.save(tmp_path / "saved")
    assert TokenRows.load(tmp_path / "saved").digest == rows.digest
    assert [len(rows.images.get(row, ())) for row in range(4)] == [len(sizes) for sizes in SIZES]
    (tmp_path / "pictures" / "0.png").write_bytes(draw((16, 24)))
    assert read(path, renderer, files).digest != rows.digest
    config = load_config(folder)
    assert isinstance(config, VisionConfig)
    answer = {"role": "assistant", "content": "yes"}
    long = {"messages": [{"role": "user", "content": "ab?"}, answer, *chat(image_part(draw((40, 32))))["messages"]]}
    (tmp_path / "long.jsonl").write_text(json.dumps(long))
    whole = read(str(tmp_path / "long.jsonl"), renderer, files)
    begins = whole.images[0][0].at
    cut = read(str(tmp_path / "long.jsonl"), renderer, files, seq_len=begins + 3)
    assert cut.lengths.tolist() == [begins] and not cut.images and cut.learned.any()
    assert config.image_token not in cut.token_ids
    after = begins + whole.images[0][0].tokens
    assert read(str(tmp_path / "long.jsonl"), renderer, files, seq_len=after).images == whole.images


def at_url(url: object) -> dict[str, Any]:
    return chat({"type": "image_url", "image_url": {"url": url}})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (at_url("none.png"), r"'none.png' can't be read: No such file"),
        (at_url("../outside.png"), "is not in the folder of the data"),
        (at_url("/etc/hostname"), "is not in the folder of the data"),
        (at_url("leads_out.png"), "is not in the folder of the data"),
        (at_url("."), "can't be read"),
        (at_url("a\0b"), "null"),
        (at_url("https://example.com/a.png"), "nothing is fetched"),
        (at_url("file:///etc/hostname"), "nothing is fetched"),
        (at_url(7), "must be text"),
        (at_url("large.png"), "at most 20,000,000 are taken"),
        (at_url("rows.jsonl"), r"messages hold|image"),
        (at_url("half.png"), "image"),
        (chat(*[image_part(draw((16, 16)))] * (MOST_IMAGES + 1)), "too many"),
    ],
)
def test_rows_whose_images_cannot_be_taken_are_named(
    row: dict[str, Any], reason: str, folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "outside.png").write_bytes(draw((16, 16)))
    (data / "leads_out.png").symlink_to(tmp_path / "outside.png")
    (data / "half.png").write_bytes(draw((16, 16))[:90])
    with (data / "large.png").open("wb") as file:
        file.truncate(MOST_IMAGE_BYTES + 1)
    (data / "rows.jsonl").write_text("\n" + json.dumps(row))
    with pytest.raises(HeadwayError, match=rf"rows\.jsonl:2: .*{reason}"):
        read(str(data / "rows.jsonl"), load_renderer(folder), ImageFiles(tmp_path / "images"))
    assert not (tmp_path / "images").exists()


def test_a_text_model_refuses_images(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"rows\.jsonl:1: .*this model does not see"):
        read(write_rows(tmp_path), load_renderer(resolve_model("tiny")), ImageFiles(tmp_path / "images"))
