"""Decoding of untrusted images, in bounded memory."""

from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from headway.base.errors import HeadwayError, UsageError
from headway.base.extras import install_command

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class ImageError(HeadwayError):
    """An image that cannot be taken, and why."""


@dataclass(frozen=True)
class ImageLimits:
    """Bounds on one encoded image. Decoding takes up to 16 bytes for each of its pixels."""

    most_bytes: int = 20_000_000
    most_pixels: int = 25_000_000
    longest_side: int = 20_000

    def check_size(self, width: int, height: int) -> None:
        """Raise ImageError for an image of this size."""
        if width < 1 or height < 1:
            raise ImageError(f"an image of {width} x {height} pixels is empty")
        if width * height > self.most_pixels or max(width, height) > self.longest_side:
            raise ImageError(
                f"an image of {width} x {height} pixels is too large: at most {self.most_pixels:,} pixels and "
                f"{self.longest_side:,} on a side are taken"
            )


def decode_image(encoded: bytes, limits: ImageLimits = ImageLimits()) -> "Image":  # noqa: B008 - frozen
    """Decode a still PNG, JPEG, WebP or GIF to RGB, upright as its EXIF data say. Raises ImageError with the reason."""
    if len(encoded) > limits.most_bytes:
        raise ImageError(f"an image of {len(encoded):,} bytes is too large: at most {limits.most_bytes:,} are taken")
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise UsageError(f"images need a package: {install_command('vision')}") from None
    try:
        with Image.open(BytesIO(encoded), formats=FORMATS) as image:
            limits.check_size(*image.size)
            # Photos of some phones (MPO) are a JPEG with others behind it, of which the first counts.
            if getattr(image, "is_animated", False) and image.format != "MPO":
                raise ImageError(f"an animated {image.format} is not taken; send one of its frames")
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f"these {len(encoded):,} bytes are no {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"an image is too large: at most {limits.most_pixels:,} pixels are taken") from None
    except Exception as error:  # Decoders raise almost anything on damaged bytes.
        raise ImageError(f"an image is damaged: {str(error)[:200] or type(error).__name__}") from None
