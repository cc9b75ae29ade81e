"""Images of requests: encoded bytes by digest, which are sent once, and their patches."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headway.base.errors import HeadwayError
from headway.core.images import MOST_IMAGES, Grid, ImageUse, RequestImage, image_digest
from headway.core.openai.requests import RequestError
from headway.core.protocol import GenerateRequest
from headway.core.streams import Floats
from headway.models.configs.config import ModelConfig
from headway.models.images.processor import ImageProcessor, has_processor, load_processor
from headway.models.images.reader import ImageReader, image_reader
from headway.models.vision.config import VisionConfig
from headway.models.vision.places import feature_count

IMAGES = "images"
"""The field that a refusal names; with status 409, the client is to send the bytes."""
_KEPT_BYTES = 512 << 20
_THREADS = 2
"""Images that are decoded at a time: each needs memory of many times its size."""


@dataclass(frozen=True, slots=True)
class ServedImage:
    """An image of a request, ready for the tower."""

    use: ImageUse
    grid: Grid
    patches: Floats


class RequestImages:
    """Reads the images of requests, at most `most` of each, in a bounded pool, and keeps their bytes for requests that
    name them alone. These are known by the salt of the cache, so that nobody learns what others have sent."""

    def __init__(
        self, reader: ImageReader, placeholder: int, most: int = MOST_IMAGES, most_bytes: int = _KEPT_BYTES
    ) -> None:
        self._reader, self._placeholder, self._most, self._most_bytes = reader, placeholder, most, most_bytes
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="images")
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str | None, str], bytes] = OrderedDict()
        self._bytes = 0

    async def read(self, request: GenerateRequest) -> tuple[ServedImage, ...]:
        """Decode a request's images. Raises RequestError: with status 409 where the bytes of one are not here."""
        self._check_places(request.token_ids, request.images)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, request)

    @property
    def processor(self) -> ImageProcessor:
        return self._reader.processor

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def _read(self, request: GenerateRequest) -> tuple[ServedImage, ...]:
        return tuple(self._read_one(image, request.cache_salt) for image in request.images)

    def _read_one(self, image: RequestImage, salt: str | None) -> ServedImage:
        data = self._bytes_of(image, salt)
        try:
            grid, patches = self._reader.read(image.digest, data)
        except HeadwayError as error:
            raise RequestError(str(error), IMAGES) from None
        count = feature_count(grid, self._reader.processor.merge)
        if count != image.tokens:
            raise RequestError(f"an image has {count} features, but {image.tokens} placeholders", IMAGES)
        self._keep(image, data, salt)
        return ServedImage(image, grid, patches)

    def _bytes_of(self, image: RequestImage, salt: str | None) -> bytes:
        key = salt, image.digest
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        if not image.data:
            raise RequestError("the bytes of an image are not here any more: send all of them", IMAGES, 409)
        if image_digest(image.data) != image.digest:
            raise RequestError("the digest of an image is not that of its bytes", IMAGES)
        return image.data

    def _keep(self, image: RequestImage, data: bytes, salt: str | None) -> None:
        """Keep the bytes of an image that was read: what is refused takes no memory."""
        with self._lock:
            if (salt, image.digest) not in self._kept:
                self._kept[salt, image.digest] = data
                self._bytes += len(data)
            while self._bytes > self._most_bytes:
                self._bytes -= len(self._kept.popitem(last=False)[1])

    def _check_places(self, token_ids: Sequence[int], images: Sequence[RequestImage]) -> None:
        """Raise RequestError where images are too many, or their tokens are no placeholders, or not in order."""
        if len(images) > self._most:
            raise RequestError(f"{len(images)} images are too many: at most {self._most} are taken", IMAGES)
        end = 0
        for image in images:
            tokens = token_ids[image.at : image.at + image.tokens] if image.at >= end else []
            # Counted first: a list of as many placeholders as a request may claim has no end.
            if image.tokens < 1 or len(tokens) != image.tokens or set(tokens) != {self._placeholder}:
                raise RequestError(f"an image is at token {image.at}, where its placeholders are not", IMAGES)
            end = image.at + image.tokens


def request_images(config: ModelConfig, folder: Path | None, most: int = MOST_IMAGES) -> RequestImages | None:
    """Make the reader of images for a model; None where it does not see, or its folder has no image processor."""
    if folder is None or not isinstance(config, VisionConfig) or not has_processor(folder):
        return None
    return RequestImages(image_reader(load_processor(folder)), config.image_token, most)
