"""Malformed images for the hostile client, drawn by a seed: every request that is made here has to be refused."""

import base64
import io
import json
import random
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

from PIL import Image

from headway.core.images import data_url, image_digest
from headway.core.messages import image_part
from headway.models.tiny_tokenizer import tiny_tokenizer

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
Request = tuple[str, bytes]
"""A route and a body."""


def picture(rng: random.Random, kind: str, size: tuple[int, int] = (40, 24)) -> bytes:
    """A valid image of noise."""
    stream = io.BytesIO()
    Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1])).save(stream, kind)
    return stream.getvalue()


def png(width: int, height: int, pixels: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A gray PNG that claims to be this large, with right checksums."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    found = [(b"IHDR", header), *chunks, (b"IDAT", pixels), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in found
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@cache
def zeros(megabytes: int) -> bytes:
    """Kilobytes that unpack to megabytes."""
    packer = zlib.compressobj(9)
    return b"".join([packer.compress(bytes(2**20)) for _ in range(megabytes)] + [packer.flush()])


def truncated(rng: random.Random) -> bytes:
    data = picture(rng, rng.choice(FORMATS))
    return data[: rng.randrange(len(data))]


def large_and_truncated(rng: random.Random) -> bytes:
    """As large as is taken: the decoder begins, and finds out late."""
    return png(4900, 5000, zeros(16)[: rng.randrange(64, 2**14)])


def flipped(rng: random.Random) -> bytes:
    data = bytearray(picture(rng, rng.choice(FORMATS)))
    for _ in range(rng.choice((1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def huge(rng: random.Random) -> bytes:
    side = rng.choice((5001, 20_001, 65_535, 2**31 - 1))
    return png(*rng.choice([(side, 5000), (5000, side), (side, side)]), zeros(1))


def bomb(rng: random.Random) -> bytes:
    """Unpacks to hundreds of megabytes: pixels, or texts beside them."""
    kind = rng.randrange(3)
    if kind == 0:
        return png(20_000, 20_000, zeros(96))
    chunk = [(b"zTXt", b"k\0\0" + zeros(96)), (b"iTXt", b"k\0\1\0\0\0" + zeros(96))][kind - 1]
    return png(16, 16, zlib.compress(bytes(17 * 16)), *[chunk] * 3)


def animated(rng: random.Random) -> bytes:
    frames = [Image.new("RGB", (16, 16), rng.randbytes(3).hex().join(("#", ""))) for _ in range(rng.randint(2, 5))]
    stream = io.BytesIO()
    frames[0].save(stream, rng.choice(("GIF", "WEBP", "PNG")), save_all=True, append_images=frames[1:])
    return stream.getvalue()


def narrow(rng: random.Random) -> bytes:
    side = rng.randint(201, 3000)
    return picture(rng, rng.choice(FORMATS), rng.choice([(side, 1), (1, side)]))


def another_type(rng: random.Random) -> bytes:
    texts = [
        b"",
        b"%PDF-1.7\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"GIF89a",
        b"\x89PNG\r\n\x1a\n",
        b"RIFF\0\0\0\0WEBP",
    ]
    return rng.choice([*texts, rng.randbytes(rng.randrange(1, 4000)), picture(rng, "BMP"), picture(rng, "TIFF")])


KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "truncated": truncated, "large and truncated": large_and_truncated, "bits flipped": flipped, "huge": huge,
    "bomb": bomb, "animated": animated, "narrow": narrow, "another type": another_type,
}  # fmt: skip
"""Images that can't be taken, by what is wrong with them."""


def bad_image(rng: random.Random, kind: str) -> bytes:
    """Draw one of `kind`. Damage that Pillow does not mind (pixels of another color) makes no malformed image, and is
    drawn again."""
    while True:
        data = KINDS[kind](rng)
        if kind not in ("truncated", "bits flipped") or not _readable(data):
            return data


def _readable(data: bytes) -> bool:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            image.load()
            still = not getattr(image, "is_animated", False) and max(image.size) <= 200 * min(image.size)
            return still and image.width * image.height <= 25_000_000
    except Exception:
        return False


def bad_part(rng: random.Random) -> Any:
    """A part of a message that names no image at all."""
    good = base64.b64encode(picture(rng, "PNG")).decode()
    at = rng.randrange(len(good))
    urls: list[Any] = [
        f"data:image/png;base64,{good[:at]}{rng.choice('!{ -_é')}{good[at + 1 :]}",
        f"data:image/png;base64,{good.rstrip('=')[: 4 * (at // 4) + 1]}",
        f"data:image/{rng.choice(('tiff', 'svg+xml', 'x-icon', 'bmp', 'heic'))};base64,{good}",
        f"data:{rng.choice(('text/html', 'application/pdf', 'video/mp4', ''))};base64,{good}",
        f"data:image/png,{good}", "http://localhost/a.png", "file:///etc/passwd", "ftp://x/y", "", None, 7, [], {},
    ]  # fmt: skip
    parts: list[Any] = [{"type": "image_url"}, {"type": "image_url", "image_url": rng.choice((None, 5, [], {}))}]
    parts += [{"type": "image"}, {"type": "input_image", "image_url": data_url(picture(rng, "PNG"))}]
    return rng.choice([*parts, *({"type": "image_url", "image_url": {"url": url}} for url in urls)])


def chat(role: str, parts: list[Any]) -> Request:
    body = {"messages": [{"role": role, "content": [{"type": "text", "text": "?"}, *parts]}], "max_tokens": 2}
    return CHAT, json.dumps(body).encode()


@cache
def placeholder() -> int:
    token = tiny_tokenizer(vision=True).token_to_id("<|image_pad|>")
    assert token is not None
    return token


def generate(tokens: int, image: list[Any]) -> Request:
    token_ids = [5, *[placeholder()] * tokens, 6]
    return GENERATE, json.dumps(
        {"token_ids": token_ids, "sampling_params": {"max_tokens": 2}, "images": [image]}
    ).encode()


def bad_use(rng: random.Random) -> Request:
    """A right image that a request of tokens names in a wrong way. It has 15 features."""
    data = picture(rng, "PNG")
    encoded, digest = base64.b64encode(data).decode(), image_digest(data)
    images: list[list[Any]] = [
        [1, 15, digest, ""], [1, 15, "0" * 32, encoded], [1, 15, "x" * 32, encoded], [1, 15, "../../etc/passwd", ""],
        [0, 15, digest, encoded], [-1, 15, digest, encoded], [1, 14, digest, encoded], [1, 0, digest, encoded],
        [1, -15, digest, encoded], [2**62, 15, digest, encoded], [1, 2**62, digest, encoded], [1, 15, digest, "???"],
        [1, 15, digest], [1, 15], [], [None] * 4, [1, 15, digest, [1, 2]],
    ]  # fmt: skip
    return generate(15, rng.choice(images))


def malformed_image(rng: random.Random) -> tuple[str, Request]:
    """Draw a kind of damage and a request that holds it."""
    kind = rng.choice([*KINDS, *KINDS, "part", "use", "too many", "assistant", "too long"])
    good = image_part(picture(rng, "PNG", (16, 16)))
    if kind == "part":
        return kind, chat("user", [*rng.choice([[], [good]]), bad_part(rng)])
    if kind == "use":
        return kind, bad_use(rng)
    if kind == "too many":
        return kind, chat("user", [good] * rng.choice((65, 100, 500)))
    if kind == "assistant":
        return kind, chat("assistant", [good])
    if kind == "too long":
        return kind, chat("user", [image_part(picture(rng, "PNG", (128, 128)))] * 40)
    data = bad_image(rng, kind)
    if rng.random() < 0.3:
        return kind, generate(6, [1, 6, image_digest(data), base64.b64encode(data).decode()])
    return kind, chat(rng.choice(("user", "tool")), [*rng.choice([[], [good]]), image_part(data)])
