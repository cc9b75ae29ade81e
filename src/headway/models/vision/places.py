"""Places of images among tokens: runs of placeholders, and positions in three axes. Without torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.base.errors import HeadwayError
from headway.core.images import Grid, TokenImages

Positions = NDArray[np.int64]


def feature_count(grid: Grid, merge: int) -> int:
    """Features, and so placeholder tokens, of an image of which `merge` x `merge` patches become one."""
    return grid.patches // merge**2


def expand_placeholders(
    token_ids: Sequence[int], placeholder: int, counts: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Repeat each `placeholder` as often as its image has features. Returns the tokens, and where each run begins."""
    found = sum(token == placeholder for token in token_ids)
    if found != len(counts):
        raise HeadwayError(f"{len(counts)} images, but {found} image tokens among the {len(token_ids)} of the text")
    expanded: list[int] = []
    starts: list[int] = []
    for token in token_ids:
        if token == placeholder:
            starts.append(len(expanded))
            expanded += [token] * counts[len(starts) - 1]
        else:
            expanded.append(token)
    return expanded, starts


def sample_positions(length: int, images: Sequence[tuple[int, Grid]], merge: int) -> Positions:
    """The positions (3, length) of one sample in time, height and width, given where its images begin, in order.

    Text counts on in all three axes. An image's features have those of their place in the grid, counted from the
    position that the next text would have had; text goes on after the largest of them.
    """
    parts: list[Positions] = []
    token = position = 0
    for start, grid in images:
        if start < token:
            raise HeadwayError(f"an image begins at token {start}, inside of the one before it")
        parts.append(_text(position, start - token))
        position += start - token
        rows, columns = grid.rows // merge, grid.columns // merge
        parts.append(position + np.indices((grid.times, rows, columns)).reshape(3, -1))
        token, position = start + feature_count(grid, merge), position + max(rows, columns)
    if token > length:
        raise HeadwayError(f"an image ends at token {token} of a sample of {length}")
    return np.concatenate([*parts, _text(position, length - token)], axis=1)


def packed_positions(lengths: Sequence[int], images: TokenImages, merge: int) -> Positions:
    """The positions (3, T) of samples end to end. Raises HeadwayError where an image is cut by a sample's end."""
    grids, uses = images.shapes, images.uses.tolist()
    parts, first = [], 0
    for length in lengths:
        own = [(start - first, grids[image]) for start, image in uses if first <= start < first + length]
        parts.append(sample_positions(length, own, merge))
        first += length
    return np.concatenate(parts, axis=1)


def packed_ends(lengths: Sequence[int], images: TokenImages, merge: int) -> Positions:
    """The position (T,), in its sample, of the last token of the image that a token is of; that of other tokens is
    their own."""
    ends, grids = np.arange(sum(lengths)), images.shapes
    for start, image in images.uses.tolist():
        end = start + feature_count(grids[image], merge)
        ends[start:end] = end - 1
    firsts: Positions = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    return ends - firsts


def longest_span(images: TokenImages, merge: int) -> int:
    """Tokens of the longest image."""
    return max(feature_count(grid, merge) for grid in images.shapes)


def feature_places(images: TokenImages, merge: int) -> tuple[Positions, Positions]:
    """The tokens that features replace, and the number of each token's feature among those of all images."""
    counts = [feature_count(grid, merge) for grid in images.shapes]
    firsts = np.cumsum([0, *counts])
    uses = images.uses.tolist()
    tokens = np.concatenate([start + np.arange(counts[image]) for start, image in uses])
    features = np.concatenate([firsts[image] + np.arange(counts[image]) for _, image in uses])
    return tokens, features


def check_placeholders(token_ids: NDArray[Any], images: TokenImages | None, placeholder: int, merge: int) -> None:
    """Raise HeadwayError where an image lacks placeholders among the tokens. Others are text: models sample them."""
    if images is None:
        return
    tokens, _ = feature_places(images, merge)
    found = np.count_nonzero(token_ids[tokens[tokens < len(token_ids)]] == placeholder)
    if found < len(tokens):
        raise HeadwayError(f"images: {len(tokens)} features, but {found} image tokens where they stand")


def _text(position: int, count: int) -> Positions:
    return np.broadcast_to(position + np.arange(count), (3, count))
