"""Images of packed samples as tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.images import TokenImages
from headway.models.packed import ImageTokens, Spans
from headway.models.vision.config import VisionConfig
from headway.models.vision.places import feature_places, longest_span, packed_ends, packed_positions


def image_tokens(
    images: TokenImages,
    lengths: Sequence[int],
    config: VisionConfig,
    put: Callable[[NDArray[Any], torch.dtype], Tensor],
) -> ImageTokens:
    """Derive the model's input from the images of samples of these lengths; `put` copies an array to the device."""
    merge = config.tower.merge
    tokens_U, features_U = feature_places(images, merge)
    positions = packed_positions(lengths, images, merge) if config.mrope_section else None
    ends = packed_ends(lengths, images, merge) if config.bidirectional_images else None
    return ImageTokens(
        patches_PN=put(images.patches, torch.float32),
        grids=images.shapes,
        tokens_U=put(tokens_U, torch.int64),
        features_U=put(features_U, torch.int64),
        positions_3T=None if positions is None else put(positions, torch.int64),
        spans=None if ends is None else Spans(put(ends, torch.int64), longest_span(images, merge)),
    )


def put_on_cpu(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype)
