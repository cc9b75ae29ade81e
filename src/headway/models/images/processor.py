"""Image processors: from pixels to the patches that a vision tower takes. Without torch.

The results are those of the Hugging Face processors that compute with Pillow (`Qwen2VLImageProcessorPil`,
`Gemma3ImageProcessorPil`), number for number. Their twins over torchvision resize in other arithmetic and differ by a
few levels of brightness.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from headway.base.errors import UsageError
from headway.core.images import Grid
from headway.core.streams import Floats
from headway.models.images.decoding import ImageError, ImageLimits, decode_image
from headway.models.registry import load_config
from headway.models.vision.config import TowerConfig, VisionConfig

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
        *("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate"),
    ]
)
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_pan_and_scan": False}
"""Entries of which one value is implemented."""
_NAMES = {"image_mean": "mean", "image_std": "spread", "rescale_factor": "rescale"}


@dataclass(frozen=True)
class ImageProcessor:
    """Resizes images, normalizes them and cuts them into patches of `patch` x `patch` pixels, `merge` x `merge` of
    which become a feature. A still image is repeated `times` times. Subclasses override `size`."""

    names: ClassVar[Mapping[str, str]] = {}
    """Fields and their names in preprocessor_config.json, beside those that all have."""
    resample: ClassVar[int]
    """Pillow's number of the filter."""

    patch: int
    times: int
    merge: int
    mean: tuple[float, ...]
    spread: tuple[float, ...]
    rescale: float = 1 / 255

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The height and width to which an image of this size is resized. Raises ImageError for one that cannot be
        taken."""
        raise NotImplementedError(f"{type(self).__name__} must override size")

    @property
    def numbers(self) -> int:
        """Numbers of one patch."""
        return len(self.mean) * self.times * self.patch**2

    def process(self, encoded: bytes, limits: ImageLimits = ImageLimits()) -> tuple[Grid, Floats]:  # noqa: B008
        """Decode an image and compute its grid and patches. Raises ImageError, with the reason, for one that cannot be
        taken."""
        return self.patches(decode_image(encoded, limits))

    def patches(self, image: "Image") -> tuple[Grid, Floats]:
        """Resize, normalize and cut an RGB image. A patch is (channels, times, rows, columns) of numbers."""
        if max(image.size) > MOST_STRETCHED * min(image.size):
            sides = f"{image.width} x {image.height}"
            raise ImageError(f"an image of {sides} pixels is too narrow: at most {MOST_STRETCHED} to 1")
        height, width = self.size(image.height, image.width)
        pixels_YXC = np.asarray(image.resize((width, height), resample=self.resample))
        rows, columns, side = height // self.patch, width // self.patch, self.patch
        blocks = (rows // self.merge, self.merge, side, columns // self.merge, self.merge, side)
        cut = np.stack([table[pixels_YXC[..., channel]] for channel, table in enumerate(self._levels())])
        cut = cut.reshape(-1, *blocks).transpose(1, 4, 2, 5, 0, 3, 6)
        repeated = np.broadcast_to(cut[:, :, :, :, :, None], (*cut.shape[:5], self.times, side, side))
        return Grid(1, rows, columns), np.ascontiguousarray(repeated).reshape(rows * columns, self.numbers)

    def pixels(self, grid: Grid, patches: Floats) -> Floats:
        """Join the patches of a still image again: (channels, height, width) of normalized numbers."""
        channels, side, merge = len(self.mean), self.patch, self.merge
        blocks = (grid.rows // merge, grid.columns // merge, merge, merge, channels, self.times, side, side)
        first = patches.reshape(blocks)[:, :, :, :, :, 0]
        whole = first.transpose(4, 0, 2, 5, 1, 3, 6)
        return np.ascontiguousarray(whole).reshape(channels, grid.rows * side, grid.columns * side)

    def _levels(self) -> list[Floats]:
        """For each channel, the normalized number of each of its 256 levels."""
        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        return [(scaled - np.float32(m)) / np.float32(s) for m, s in zip(self.mean, self.spread, strict=True)]

    @classmethod
    def _fields(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Read the content of a preprocessor_config.json. Raises UsageError for what is not supported."""
        names, fixed = {**_NAMES, **cls.names}, {**_FIXED, "resample": cls.resample}
        fields: dict[str, Any] = {}
        for name, value in values.items():
            if value is None or name in _IGNORED:
                continue
            if name in names:
                fields[names[name]] = tuple(value) if isinstance(value, list | tuple) else value
            elif name not in fixed or value != fixed[name]:
                raise UsageError(f"{name} = {value!r} of the image processor is not supported")
        return fields


@dataclass(frozen=True)
class PatchProcessor(ImageProcessor):
    """Qwen's: sides are rounded to whole features, and the pixels kept between `fewest_pixels` and `most_pixels`."""

    names = {
        "patch_size": "patch",
        "temporal_patch_size": "times",
        "merge_size": "merge",
        "min_pixels": "fewest_pixels",
        "max_pixels": "most_pixels",
    }
    resample = 3

    patch: int = 14
    times: int = 2
    merge: int = 2
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    spread: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    fewest_pixels: int = 56 * 56
    most_pixels: int = 28 * 28 * 1280

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "PatchProcessor":
        """Read the content of a preprocessor_config.json, old or new. Raises UsageError for what is not supported."""
        size = values.get("size") or {}
        bounds = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        given = {name: value for name, value in values.items() if name != "size" and value is not None}
        return cls(**cls._fields(bounds | given))

    def size(self, height: int, width: int) -> tuple[int, int]:
        unit = self.patch * self.merge
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > self.most_pixels:
            shrink = math.sqrt(height * width / self.most_pixels)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns * unit**2 < self.fewest_pixels:
            grow = math.sqrt(self.fewest_pixels / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return rows * unit, columns * unit


@dataclass(frozen=True)
class SquareProcessor(ImageProcessor):
    """Gemma 3's, without crops (pan and scan): every image becomes a square of `side` pixels."""

    resample = 2

    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    spread: tuple[float, ...] = (0.5, 0.5, 0.5)
    side: int = 224

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], tower: TowerConfig) -> "SquareProcessor":
        """Read the content of a preprocessor_config.json; patches are those of the model's tower. Raises UsageError for
        what is not supported, or does not fit the tower."""
        size = values.get("size") or {"height": cls.side, "width": cls.side}
        side = int(tower.positions**0.5) * tower.patch
        if size != {"height": side, "width": side}:
            raise UsageError(f"size = {size!r} of the image processor does not fit the model's {side} x {side} pixels")
        fields = cls._fields({name: value for name, value in values.items() if name != "size"})
        return cls(patch=tower.patch, times=1, merge=tower.merge, side=side, **fields)

    def size(self, height: int, width: int) -> tuple[int, int]:
        return self.side, self.side


def has_processor(folder: Path | str) -> bool:
    """Tell if a checkpoint folder has an image processor."""
    return any((Path(folder) / name).is_file() for name in _FILES)


def load_processor(folder: Path | str) -> ImageProcessor:
    """Read the image processor of a checkpoint folder. Raises UsageError that names what is not supported."""
    for name in _FILES:
        path = Path(folder) / name
        if path.is_file():
            values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            values = values.get("image_processor", values)
            if "patch_size" in values:
                return PatchProcessor.from_hf(values)
            if str(values.get("image_processor_type")).startswith("Gemma3ImageProcessor"):
                return SquareProcessor.from_hf(values, _tower(folder))
    raise UsageError(f"{folder} has no image processor that is known here (preprocessor_config.json)")


def _tower(folder: Path | str) -> TowerConfig:
    config = load_config(folder)
    if not isinstance(config, VisionConfig):
        raise UsageError(f"{folder} has an image processor, but models of the family {config.family!r} do not see")
    return config.tower
