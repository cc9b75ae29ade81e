"""Image processing: number for number that of Hugging Face, and bounded for bytes that nobody vouches for."""

import io
import json
import random
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from headway.base.errors import HeadwayError, UsageError
from headway.core.images import image_digest
from headway.models.images.decoding import ImageError, ImageLimits, decode_image
from headway.models.images.processor import PatchProcessor, SquareProcessor, load_processor
from headway.models.vision.config import TowerConfig

QWEN3 = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SMALL = {"size": {"shortest_edge": 3000, "longest_edge": 40_000}}
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def drawn(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    shape = (height, width, 3) if mode != "L" else (height, width)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@settings(max_examples=30, deadline=None)
@given(
    width=st.integers(1, 200),
    height=st.integers(1, 200),
    mode=st.sampled_from(["RGB", "L", "RGBA", "P"]),
    values=st.sampled_from([SMALL, {**QWEN3, **SMALL}, {"min_pixels": 56 * 56, "max_pixels": 30_000, "merge_size": 3}]),
)
@example(width=1, height=1, mode="RGB", values=SMALL)
@example(width=199, height=1, mode="L", values=SMALL)
@example(width=42, height=70, mode="RGB", values=SMALL)  # a half of a feature: rounded to even
def test_patches_are_those_of_hugging_face(width: int, height: int, mode: str, values: dict[str, object]) -> None:
    from transformers.image_utils import load_image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ImageError, match="too narrow"):
            PatchProcessor.from_hf(values).process(encoded(drawn(width, height), "PNG"))
        return
    data = encoded(drawn(width, height, mode), "PNG")
    theirs = Qwen2VLImageProcessorPil(**values)(load_image(Image.open(io.BytesIO(data))), return_tensors="np")
    grid, patches = PatchProcessor.from_hf(values).process(data)
    assert [list(grid)] == theirs["image_grid_thw"].tolist()
    assert patches.dtype == np.float32 and np.array_equal(patches, theirs["pixel_values"])


@settings(max_examples=20, deadline=None)
@given(width=st.integers(1, 200), height=st.integers(1, 200), mode=st.sampled_from(["RGB", "L", "RGBA", "P"]))
@example(width=199, height=1, mode="L")
def test_squares_are_those_of_hugging_face(width: int, height: int, mode: str) -> None:
    from transformers.image_utils import load_image
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tower = TowerConfig(1, 8, 8, 1, 7, 8, merge=2, times=1, positions=64, one_size=True)
    values = {"size": {"height": 56, "width": 56}, "do_pan_and_scan": False}
    data = encoded(drawn(width, height, mode), "PNG")
    theirs = Gemma3ImageProcessorPil(**values)(load_image(Image.open(io.BytesIO(data))), return_tensors="np")
    grid, patches = SquareProcessor.from_hf(values, tower).process(data)
    assert grid == tower.only_grid and patches.dtype == np.float32
    # A patch is in the order of rows; four that become one feature follow each other.
    pixels = patches.reshape(4, 4, 2, 2, 3, 7, 7).transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, 56, 56)
    assert np.array_equal(pixels, theirs["pixel_values"][0])


def test_a_square_processor_is_read_as_hugging_face_writes_it(tmp_path: Path) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    hf = json.loads((Path(__file__).parent / "families" / "gemma3" / "images.json").read_text())
    del hf["images"]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, do_pan_and_scan=False).save_pretrained(tmp_path)
    assert load_processor(tmp_path) == SquareProcessor(patch=4, times=1, merge=2, side=16)
    for wrong in ({"do_pan_and_scan": True}, {"size": {"height": 24, "width": 24}}):
        Gemma3ImageProcessorPil(**{"size": {"height": 16, "width": 16}, **wrong}).save_pretrained(tmp_path)
        with pytest.raises(UsageError, match=next(iter(wrong))):
            load_processor(tmp_path)


def test_a_processor_is_read_as_hugging_face_writes_it(tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    Qwen2VLImageProcessorPil(**QWEN3, **SMALL).save_pretrained(tmp_path)
    assert load_processor(tmp_path) == PatchProcessor.from_hf({**QWEN3, **SMALL})
    with pytest.raises(UsageError, match="do_resize"):
        PatchProcessor.from_hf({"do_resize": False})
    with pytest.raises(UsageError, match=r"preprocessor_config\.json"):
        load_processor(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", FORMATS)
def test_images_turned_by_their_exif_data_are_upright(kind: str) -> None:
    image = drawn(30, 20)
    if kind != "GIF":
        exif = Image.Exif()
        exif[274] = 6
        assert decode_image(encoded(image, kind, exif=exif)).size == (20, 30)
    assert decode_image(encoded(image, kind)).size == (30, 20)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animated_images_are_refused(kind: str) -> None:
    frames = [drawn(30, 20, seed=n) for n in range(3)]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    with pytest.raises(ImageError, match="animated"):
        decode_image(data)


def test_other_types_are_refused() -> None:
    for data in (b"", b"<svg/>", b"%PDF-1.7", encoded(drawn(9, 9), "BMP"), encoded(drawn(9, 9), "TIFF"), bytes(1000)):
        with pytest.raises(ImageError, match="are no PNG"):
            decode_image(data)


def claimed(width: int, height: int) -> bytes:
    """A small PNG whose header claims another size."""
    data = encoded(drawn(9, 9), "PNG")
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def test_large_images_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode_image(claimed(9, 9)).size == (9, 9)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    for width, height, reason in (
        (60_000, 60_000, "too large"),
        (12_000, 10_000, "too large"),
        (6_000, 5_000, "too large"),
        (20_001, 1, "on a side"),
    ):
        with warnings.catch_warnings(), pytest.raises(ImageError, match=reason):
            warnings.simplefilter("ignore")  # Pillow warns of large images, too
            decode_image(claimed(width, height))
    with pytest.raises(ImageError, match="bytes is too large"):
        decode_image(bytes(100), ImageLimits(most_bytes=99))


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Damage encoded bytes: some changed, some cut out, repeated or cut off."""
    bytes_ = bytearray(data)
    for _ in range(draw.randint(1, 6)):
        at, size = draw.randrange(len(bytes_)), draw.randint(1, 24)
        match draw.randrange(5):
            case 0:
                bytes_[at] = draw.randrange(256)
            case 1:
                bytes_[at : at + size] = draw.randbytes(size)
            case 2:
                del bytes_[at : at + size]
            case 3:
                bytes_[at:at] = bytes_[max(0, at - size) : at]
            case 4:
                bytes_[at : at + 4] = draw.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"])
        if len(bytes_) < 8:
            break
    return bytes(bytes_[: draw.randint(4, len(bytes_))] if draw.random() < 0.2 else bytes_)


def test_damaged_images_give_an_image_or_the_reason() -> None:
    draw, limits = random.Random(0), ImageLimits(most_pixels=100_000)
    exif = Image.Exif()
    exif[274] = 3
    seeds = [encoded(drawn(37, 23, mode), kind) for kind in FORMATS for mode in ("RGB", "P", "L") if mode != "P"]
    seeds += [encoded(drawn(37, 23), kind, exif=exif) for kind in ("PNG", "JPEG", "WEBP")]
    seeds += [encoded(drawn(37, 23), "GIF", save_all=True, append_images=[drawn(37, 23, seed=1)])]
    seeds += [encoded(drawn(37, 23).quantize(16), "PNG"), encoded(drawn(37, 23), "JPEG", progressive=True)]
    refused = 0
    processor = PatchProcessor.from_hf(SMALL)
    for number in range(2000):
        try:
            grid, patches = processor.process(mutated(seeds[number % len(seeds)], draw), limits)
            assert len(patches) == grid.patches
        except ImageError as error:
            assert isinstance(error, HeadwayError) and str(error) and len(str(error)) < 400
            refused += 1
    assert 500 < refused < 2000


def test_digests_name_bytes() -> None:
    one, other = image_digest(b"one"), image_digest(b"other")
    assert one == image_digest(b"one") != other and len(one) == 32
