"""Images of running sequences: the tokens of a step that features replace, these features, and positions."""

from collections import OrderedDict
from collections.abc import Sequence as Items

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.inputs.layout import StepLayout
from headway.inference.embedded.scheduling.sequence import Sequence
from headway.inference.images import ServedImage
from headway.models.packed import Features, ImageTokens, Spans
from headway.models.vision.config import VisionConfig
from headway.models.vision.costs import MOST_FEATURE_BYTES, MOST_PATCHES
from headway.models.vision.decoder import VisionLM
from headway.models.vision.places import feature_count, sample_positions

Ints = NDArray[np.int64]


class StepImages:
    """Makes the model's input of steps with images. Features are kept by digest until the weights change. Where
    positions have three axes, a text that follows images is at positions that are shifted against its place among the
    tokens; elsewhere it is as any other."""

    def __init__(self, model: VisionLM, max_running: int, most_bytes: int = MOST_FEATURE_BYTES) -> None:
        self._model, self._most_bytes = model, most_bytes
        config = model.config
        assert isinstance(config, VisionConfig)
        self._merge = config.tower.merge
        self._bidirectional = config.bidirectional_images
        self._features: OrderedDict[str, Features] = OrderedDict()
        self._bytes = 0
        self._sequences: list[Sequence | None] = [None] * max_running
        self._positions: list[Ints] = [np.empty((3, 0), np.int64)] * max_running
        self._ends: Ints = np.zeros(max_running, dtype=np.int64)
        """By row, the place after its last image; 0 without images."""
        self._shifts: Ints = np.zeros(max_running, dtype=np.int64)
        self.passes = 0
        """Images that the tower has computed."""

    def enter(self, sequence: Sequence) -> None:
        """Start a sequence in its row."""
        row, images = sequence.row, sequence.images
        self._sequences[row] = sequence if images else None
        self._ends[row] = images[-1].use.at + images[-1].use.tokens if images else 0
        self._shifts[row] = 0
        if images and self._model.axes is not None:
            places = [(image.use.at, image.grid) for image in images]
            self._positions[row] = known = sample_positions(sequence.prompt_len + 1, places, self._merge)
            self._shifts[row] = known[0, -1] - sequence.prompt_len

    def forget_features(self) -> None:
        """Drop all features, as after new weights."""
        self._features.clear()
        self._bytes = 0

    def has_images(self, layout: StepLayout) -> bool:
        """Tell if a step differs from that of texts."""
        return self.shows(layout) or bool(self._shifts[layout.rows].any())

    def shows(self, layout: StepLayout) -> bool:
        """Tell if a step has tokens of images, or of the text before them. After its last image, a sequence's positions
        are one shift away from its places."""
        return bool((layout.starts < self._ends[layout.rows]).any())

    def shift(self, row: int) -> int:
        """Return how far a sequence's text is, after its last image, from its places."""
        return int(self._shifts[row])

    def inputs(self, layout: StepLayout) -> ImageTokens:
        """The images of a step that has some."""
        places, tokens, shown = [], list[Ints](), list[tuple[ServedImage, Ints]]()
        ends = layout.positions_T.copy()
        first, longest = 0, 1
        for row, start, count in zip(layout.rows.tolist(), layout.starts.tolist(), layout.counts.tolist(), strict=True):
            sequence = self._sequences[row]
            if self._model.axes is not None:
                places.append(self._places(row, start, count))
            for image in () if sequence is None else sequence.images:
                begin, end = max(start, image.use.at), min(start + count, image.use.at + image.use.tokens)
                if begin < end:
                    tokens.append(np.arange(begin, end) - start + first)
                    ends[tokens[-1]] = end - 1
                    longest = max(longest, end - begin)
                    shown.append((image, np.arange(begin, end) - image.use.at))
            first += count
        made = self._features_of([image for image, _ in shown])
        images = self._tensors(tokens, [(made[image.use.digest], which) for image, which in shown])
        if places:
            images.positions_3T = self._put(np.concatenate(places, axis=1))
        if self._bidirectional:
            images.spans = Spans(self._put(ends), longest)
        return images

    def _places(self, row: int, start: int, count: int) -> Ints:
        """The positions (3, count) of a sequence's tokens."""
        at = np.broadcast_to(np.arange(start, start + count), (3, count))
        if self._sequences[row] is None:
            return at
        known = self._positions[row]
        prompt = known[:, start : min(start + count, known.shape[1] - 1)]
        return np.concatenate([prompt, at[:, prompt.shape[1] :] + self.shift(row)], axis=1)

    def _put(self, values: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._model.head_weight().device)

    def _tensors(self, tokens: Items[Ints], features: Items[tuple[Features, Ints]]) -> ImageTokens:
        weight = self._model.head_weight()
        last_FD = weight.new_empty(0, self._model.config.width)
        deep: list[Tensor] = []
        if features:
            picked = [(made, self._put(which)) for made, which in features]
            last_FD = torch.cat([made.last_FD[which] for made, which in picked])
            levels = range(len(features[0][0].deep))
            deep = [torch.cat([made.deep[level][which] for made, which in picked]) for level in levels]
        at = np.concatenate([*tokens, np.empty(0, np.int64)])
        numbers = torch.arange(len(at), device=weight.device)
        return ImageTokens(last_FD, (), self._put(at), numbers, features=Features(last_FD, deep))

    def _features_of(self, images: Items[ServedImage]) -> dict[str, Features]:
        """The features of a step's images by digest, of which the tower computes many at once."""
        wanted = {image.use.digest: image for image in images}
        missing = [image for digest, image in wanted.items() if digest not in self._features]
        while missing:
            patches = np.cumsum([image.grid.patches for image in missing])
            count = max(1, int(np.searchsorted(patches, MOST_PATCHES, side="right")))
            self._compute(missing[:count])
            missing = missing[count:]
        for digest in wanted:
            self._features.move_to_end(digest)
        found = {digest: self._features[digest] for digest in wanted}
        while self._bytes > self._most_bytes and len(self._features) > 1:
            self._bytes -= _size(self._features.popitem(last=False)[1])
        return found

    def _compute(self, images: Items[ServedImage]) -> None:
        weight = self._model.head_weight()
        patches = torch.from_numpy(np.concatenate([image.patches for image in images]))
        made: Features = self._model.tower(patches.to(weight.device, weight.dtype), [image.grid for image in images])
        counts = [feature_count(image.grid, self._merge) for image in images]
        levels = [torch.split(level, counts) for level in (made.last_FD, *made.deep)]
        for image, (last, *deep) in zip(images, zip(*levels, strict=True), strict=True):
            # Copies, so that one image kept does not keep the others.
            features = Features(last.clone(), [level.clone() for level in deep])
            self._features[image.use.digest] = features
            self._bytes += _size(features)
        self.passes += len(images)


def _size(features: Features) -> int:
    return sum(tensor.nbytes for tensor in (features.last_FD, *features.deep))
