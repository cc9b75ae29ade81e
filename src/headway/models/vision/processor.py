"""Image processors: from pixels to the patches that a vision tower takes. Without torch.

The results are those of the Hugging Face processors that compute with Pillow (`Qwen2VLImageProcessorPil`), number for
number. Their twins over torchvision resize in other arithmetic and differ by a few levels of brightness.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headway.core.errors import UsageError
from headway.core.images import Grid
from headway.core.streams import Floats
from headway.models.vision.decoding import ImageError, ImageLimits, decode_image

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_STRETCHED = 200
"""The largest ratio of an image's sides."""
_FILES = ("processor_config.json", "preprocessor_config.json")
_IGNORED = frozenset(
    [
        *("image_processor_type", "processor_class", "video_processor", "data_format", "default_to_square"),
        *("do_convert_rgb", "return_tensors", "device", "input_data_format", "crop_size", "do_center_crop"),
        *("disable_grouping", "do_pad", "pad_size", "image_seq_length"),
    ]
)
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}
"""Entries of which one value is implemented; 3 is Pillow's bicubic filter."""


@dataclass(frozen=True)
class PatchProcessor:
    """Qwen's: sides are rounded to whole features, and the pixels kept between `fewest_pixels` and `most_pixels`.

    A feature covers `merge` x `merge` patches of `patch` x `patch` pixels. A still image is repeated `times` times.
    """

    patch: int = 14
    times: int = 2
    merge: int = 2
    fewest_pixels: int = 56 * 56
    most_pixels: int = 28 * 28 * 1280
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    spread: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    rescale: float = 1 / 255

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "PatchProcessor":
        """Read the content of a preprocessor_config.json, old or new. Raises UsageError for what is not supported."""
        names = {"patch_size": "patch", "temporal_patch_size": "times", "merge_size": "merge"}
        names |= {"min_pixels": "fewest_pixels", "max_pixels": "most_pixels", "rescale_factor": "rescale"}
        fields: dict[str, Any] = {}
        for name, value in values.items():
            if value is None or name in _IGNORED:
                continue
            if name in names:
                fields[names[name]] = value
            elif name in ("image_mean", "image_std"):
                fields["mean" if name == "image_mean" else "spread"] = tuple(value)
            elif name == "size":
                fields.setdefault("fewest_pixels", value.get("shortest_edge", cls.fewest_pixels))
                fields.setdefault("most_pixels", value.get("longest_edge", cls.most_pixels))
            elif name not in _FIXED or value != _FIXED[name]:
                raise UsageError(f"{name} = {value!r} of the image processor is not supported")
        return cls(**fields)

    @property
    def numbers(self) -> int:
        """Numbers of one patch."""
        return len(self.mean) * self.times * self.patch**2

    def process(self, encoded: bytes, limits: ImageLimits = ImageLimits()) -> tuple[Grid, Floats]:  # noqa: B008
        """Decode an image and compute its grid and patches. Raises ImageError, with the reason, for one that cannot be
        taken."""
        return self.patches(decode_image(encoded, limits))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The height and width to which an image of this size is resized."""
        if max(height, width) > MOST_STRETCHED * min(height, width):
            raise ImageError(f"an image of {width} x {height} pixels is too narrow: at most {MOST_STRETCHED} to 1")
        unit = self.patch * self.merge
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > self.most_pixels:
            shrink = math.sqrt(height * width / self.most_pixels)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns * unit**2 < self.fewest_pixels:
            grow = math.sqrt(self.fewest_pixels / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return rows * unit, columns * unit

    def patches(self, image: "Image") -> tuple[Grid, Floats]:
        """Resize, normalize and cut an RGB image. A patch is (channels, times, rows, columns) of numbers."""
        height, width = self.size(image.height, image.width)
        pixels_YXC = np.asarray(image.resize((width, height), resample=_FIXED["resample"]))
        rows, columns, side = height // self.patch, width // self.patch, self.patch
        blocks = (rows // self.merge, self.merge, side, columns // self.merge, self.merge, side)
        cut = np.stack([table[pixels_YXC[..., channel]] for channel, table in enumerate(self._levels())])
        cut = cut.reshape(-1, *blocks).transpose(1, 4, 2, 5, 0, 3, 6)
        repeated = np.broadcast_to(cut[:, :, :, :, :, None], (*cut.shape[:5], self.times, side, side))
        return Grid(1, rows, columns), np.ascontiguousarray(repeated).reshape(rows * columns, self.numbers)

    def _levels(self) -> list[Floats]:
        """For each channel, the normalized number of each of its 256 levels."""
        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        return [(scaled - np.float32(m)) / np.float32(s) for m, s in zip(self.mean, self.spread, strict=True)]


def has_processor(folder: Path | str) -> bool:
    """Tell if a checkpoint folder has an image processor."""
    return any((Path(folder) / name).is_file() for name in _FILES)


def load_processor(folder: Path | str) -> PatchProcessor:
    """Read the image processor of a checkpoint folder. Raises UsageError that names what is not supported."""
    for name in _FILES:
        path = Path(folder) / name
        if path.is_file():
            values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            values = values.get("image_processor", values)
            if "patch_size" in values:
                return PatchProcessor.from_hf(values)
    raise UsageError(f"{folder} has no image processor that is known here (preprocessor_config.json)")
