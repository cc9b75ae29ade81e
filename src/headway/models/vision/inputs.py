"""Images of packed samples as tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.images import TokenImages
from headway.models.packed import ImageTokens
from headway.models.vision.config import VisionConfig
from headway.models.vision.places import feature_places, packed_positions


def image_tokens(
    images: TokenImages,
    lengths: Sequence[int],
    config: VisionConfig,
    put: Callable[[NDArray[Any], torch.dtype], Tensor],
) -> ImageTokens:
    """Derive the model's input from the images of samples of these lengths; `put` copies an array to the device."""
    merge = config.tower.merge
    tokens_U, features_U = feature_places(images, merge)
    return ImageTokens(
        patches_PN=put(images.patches, torch.float32),
        grids=images.shapes,
        tokens_U=put(tokens_U, torch.int64),
        features_U=put(features_U, torch.int64),
        positions_3T=put(packed_positions(lengths, images, merge), torch.int64),
    )


def put_on_cpu(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype)
