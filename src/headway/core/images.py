"""Images among the tokens of samples, as they travel from environments to the trainer.

An image is named by a hash of its encoded bytes. Where it appears, the tokens have a run of placeholders, one for each
feature that the model's vision tower makes of it; the tower's input is the image's patches, which its family's
processor computed. The same image may appear in several samples of a micro-batch: it is sent, and computed, once.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway.base.errors import HeadwayError
from headway.core.streams import Floats, Ints


class Grid(NamedTuple):
    """The patches of an image: times, rows and columns. A still image has one time."""

    times: int
    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.times * self.rows * self.columns


def image_digest(encoded: bytes) -> str:
    """Name an image by its encoded bytes: 32 hexadecimal digits."""
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


MOST_IMAGES = 64
"""Images of one conversation that servers and environments take."""
MOST_IMAGE_BYTES = 20_000_000
"""Bytes of one encoded image."""
MOST_REQUEST_BYTES = 64_000_000
"""Bytes of the body of a request with images."""
_DATA_URL = re.compile(r"data:(image/[a-z.+-]{1,32});base64,", re.IGNORECASE)
IMAGE_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp", b"GIF8": "gif"}
"""Types of images, by the first bytes of their files."""
_MEDIA_TYPES = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")


class MessageImage(msgspec.Struct, frozen=True, omit_defaults=True):
    """An image in a message, before character `at` of its text. Records keep the digest alone; `data` are the encoded
    bytes where these are at hand."""

    at: int
    digest: str
    data: bytes = b""

    @classmethod
    def of(cls, data: bytes, at: int = 0) -> "MessageImage":
        """Name encoded bytes. Raises ValueError where they are too many to be looked at."""
        if len(data) > MOST_IMAGE_BYTES:
            raise ValueError(f"an image of {len(data):,} bytes is too large: at most {MOST_IMAGE_BYTES:,} are taken")
        return cls(at, image_digest(data), data)

    @property
    def url(self) -> str:
        """The bytes as a data URL; what has none is named by its digest."""
        return data_url(self.data) if self.data else f"headway-image:{self.digest}"


class ImageUse(msgspec.Struct, frozen=True, array_like=True):
    """An image among tokens: its `tokens` placeholders begin at token `at`."""

    at: int
    tokens: int
    digest: str


class RequestImage(ImageUse, frozen=True, array_like=True):
    """An image of a request. Without `data`, its encoded bytes, the engine has to know it already."""

    data: bytes = b""


def data_url(data: bytes) -> str:
    """Write an encoded image as a data URL."""
    kind = next((kind for start, kind in IMAGE_TYPES.items() if data.startswith(start)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def read_data_url(url: object) -> bytes:
    """Read an image's data URL. Nothing is fetched: raises ValueError for every other address, and what is no image."""
    if not isinstance(url, str):
        raise ValueError("image_url.url must be text: a data URL (data:image/png;base64,...)")
    found = _DATA_URL.match(url)
    if found is None:
        raise ValueError(
            f"images are sent as data URLs (data:image/png;base64,...), nothing is fetched (got {url[:40]!r})"
        )
    if found[1].lower() not in _MEDIA_TYPES:
        raise ValueError(f"an image of type {found[1]} is not taken, but {', '.join(_MEDIA_TYPES)} are")
    if len(url) > MOST_IMAGE_BYTES * 4 // 3 + 100:
        raise ValueError(f"an image is too large: at most {MOST_IMAGE_BYTES:,} bytes are taken")
    try:
        return base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"an image's data URL is not base64: {error}") from None


def content_ids(token_ids: Sequence[int], images: Sequence[ImageUse]) -> list[int]:
    """Token ids in which the placeholders of images are numbers of what these show: prefixes with other images differ.
    These numbers are negative, as no token's is."""
    ids = list(token_ids)
    for image in images:
        digest = bytes.fromhex(image.digest)
        halves = [-1 - (int.from_bytes(half, "little") >> 1) for half in (digest[:8], digest[8:16])]
        ids[image.at : image.at + image.tokens] = islice(cycle(halves), image.tokens)
    return ids


class TokenImages(msgspec.Struct):
    """The I images of a sample or a micro-batch, each once, and their U uses.

    `grids` (I, 3) are their patches in times, rows and columns, and `patches` (P, N) these patches, image after image,
    N numbers each. `uses` (U, 2), in the order of tokens: the token at which the placeholders of an image begin, and
    the image's number.
    """

    digests: list[str]
    grids: Ints
    patches: Floats
    uses: Ints

    @classmethod
    def of(cls, images: Sequence[tuple[str, Grid, Floats]], uses: Sequence[tuple[int, int]]) -> Self:
        """Join images, given by digest, grid and patches, and name the tokens where these are used."""
        grids = np.asarray([grid for _, grid, _ in images], dtype=np.int32).reshape(-1, 3)
        patches = np.concatenate([patches for _, _, patches in images])
        return cls([digest for digest, _, _ in images], grids, patches, np.asarray(uses, np.int32).reshape(-1, 2))

    @property
    def shapes(self) -> list[Grid]:
        """The grids as numbers."""
        return [Grid(*grid) for grid in self.grids.tolist()]

    def split(self) -> list[Floats]:
        """The patches of each image."""
        ends = np.cumsum([grid.patches for grid in self.shapes])
        return np.split(self.patches, ends[:-1])

    def arrays(self) -> list[NDArray[Any]]:
        return [self.grids, self.patches, self.uses]

    def check(self, tokens: int) -> None:
        """Raise HeadwayError where this contradicts itself, or places an image outside of so many tokens."""
        images = len(self.digests)
        if images < 1 or self.grids.shape != (images, 3) or self.uses.ndim != 2 or self.uses.shape[1:] != (2,):
            raise HeadwayError(f"images: {images} digests, grids {self.grids.shape}, uses {self.uses.shape}")
        if self.grids.min() < 1 or self.patches.ndim != 2:
            raise HeadwayError("images: a grid is empty, or patches are not rows of numbers")
        if sum(grid.patches for grid in self.shapes) != len(self.patches):
            raise HeadwayError(f"images: the grids do not add up to {len(self.patches)} patches")
        if not len(self.uses) or self.uses.min() < 0 or (self.uses.max(0) >= (tokens, images)).any():
            raise HeadwayError(f"images: uses must name tokens below {tokens} and images below {images}")


LoadImage = Callable[[str], tuple[Grid, Floats]]
"""Returns the grid and patches of an image, by its digest."""


def load_images(uses: Sequence[ImageUse], load_image: LoadImage) -> TokenImages | None:
    """Join the images among a sample's tokens, each once. None: there are none."""
    if not uses:
        return None
    numbers: dict[str, int] = {}
    places = [(use.at, numbers.setdefault(use.digest, len(numbers))) for use in uses]
    return TokenImages.of([(digest, *load_image(digest)) for digest in numbers], places)


def join_images(parts: Sequence[tuple[int, TokenImages | None]]) -> TokenImages | None:
    """Join the images of samples, given with the number of tokens in each. None: no sample has any."""
    if not any(images for _, images in parts):
        return None
    known: dict[str, int] = {}
    found: list[tuple[str, Grid, Floats]] = []
    uses: list[tuple[int, int]] = []
    start = 0
    for size, images in parts:
        if images is not None:
            for digest, grid, patches in zip(images.digests, images.shapes, images.split(), strict=True):
                if digest not in known:
                    known[digest] = len(found)
                    found.append((digest, grid, patches))
            uses += [(start + token, known[images.digests[image]]) for token, image in images.uses.tolist()]
        start += size
    return TokenImages.of(found, uses)
