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
from headway.models.vision.places import (
    Positions,
    feature_count,
    feature_places,
    longest_span,
    packed_ends,
    packed_positions,
)


def image_tokens(
    images: TokenImages,
    lengths: Sequence[int],
    config: VisionConfig,
    put: Callable[[NDArray[Any], torch.dtype], Tensor],
    rows: NDArray[np.int64] | None = None,
) -> ImageTokens:
    """Derive the model's input from the images of samples of these lengths; `put` copies an array to the device.

    `rows` are the tokens that a rank has where several share these samples: it gets the images that any of its tokens
    is of, and the positions of its tokens. Spans are always those of all tokens.
    """
    merge = config.tower.merge
    tokens_U, features_U = feature_places(images, merge)
    positions = packed_positions(lengths, images, merge) if config.mrope_section else None
    ends = packed_ends(lengths, images, merge) if config.bidirectional_images else None
    spans = None if ends is None else Spans(put(ends, torch.int64), longest_span(images, merge))
    grids, patches = images.shapes, images.patches
    if rows is not None:
        positions = None if positions is None else positions[:, rows]
        tokens_U, features_U = _features_at(rows, sum(lengths), tokens_U, features_U)
        used, features_U = _used_images([feature_count(grid, merge) for grid in grids], features_U)
        patches = np.concatenate([patches[:0], *(images.split()[image] for image in used)])
        grids = [grids[image] for image in used]
    return ImageTokens(
        patches_PN=put(patches, torch.float32),
        grids=grids,
        tokens_U=put(tokens_U, torch.int64),
        features_U=put(features_U, torch.int64),
        positions_3T=None if positions is None else put(positions, torch.int64),
        spans=spans,
    )


def _features_at(
    rows: Positions, tokens: int, tokens_U: Positions, features_U: Positions
) -> tuple[Positions, Positions]:
    """Those features whose tokens are among `rows`, and the place of each token among these."""
    places = np.full(tokens, -1, dtype=np.int64)
    places[rows] = np.arange(len(rows))
    mine = places[tokens_U] >= 0
    return places[tokens_U][mine], features_U[mine]


def _used_images(counts: Sequence[int], features_U: Positions) -> tuple[list[int], Positions]:
    """The images that features are of, given the features of each image, and the features' numbers among theirs."""
    image_F = np.repeat(np.arange(len(counts)), counts)
    used = np.unique(image_F[features_U])
    kept_F = np.isin(image_F, used)
    return used.tolist(), (np.cumsum(kept_F) - 1)[features_U]


def put_on_cpu(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(np.ascontiguousarray(array), dtype=dtype)
