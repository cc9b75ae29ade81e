"""Images of running sequences: the tokens of a step that features replace, these features, and positions."""

from collections import OrderedDict
from collections.abc import Sequence as Items

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.inference.embedded.running.paged import StepLayout
from headway.inference.embedded.scheduling.sequence import Sequence, ServedImage
from headway.models.packed import Features, ImageTokens, Spans
from headway.models.vision.config import VisionConfig
from headway.models.vision.costs import MOST_FEATURE_BYTES
from headway.models.vision.decoder import VisionLM
from headway.models.vision.places import sample_positions

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
        """By row, the place in its sequence from which on steps are those of a text; 0 without images."""
        self.passes = 0
        """Images that the tower has computed."""

    def enter(self, sequence: Sequence) -> None:
        """Start a sequence in its row."""
        row, images = sequence.row, sequence.images
        self._sequences[row] = sequence if images else None
        self._ends[row] = images[-1].use.at + images[-1].use.tokens if images else 0
        if images and self._model.axes is not None:
            self._ends[row] = np.iinfo(np.int64).max
            places = [(image.use.at, image.grid) for image in images]
            self._positions[row] = sample_positions(sequence.prompt_len + 1, places, self._merge)

    def forget_features(self) -> None:
        """Drop all features, as after new weights."""
        self._features.clear()
        self._bytes = 0

    def has_images(self, layout: StepLayout) -> bool:
        """Tell if a step differs from that of texts."""
        return bool((layout.starts < self._ends[layout.rows]).any())

    def inputs(self, layout: StepLayout) -> ImageTokens:
        """The images of a step that has some."""
        places, tokens, features = [], list[Ints](), list[tuple[Features, Ints]]()
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
                    features.append((self._features_of(image), np.arange(begin, end) - image.use.at))
            first += count
        images = self._tensors(tokens, features)
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
        last = known.shape[1] - 1
        prompt = known[:, start : min(start + count, last)]
        return np.concatenate([prompt, at[:, prompt.shape[1] :] + (known[0, last] - last)], axis=1)

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

    def _features_of(self, image: ServedImage) -> Features:
        digest = image.use.digest
        if digest in self._features:
            self._features.move_to_end(digest)
            return self._features[digest]
        weight = self._model.head_weight()
        patches = torch.from_numpy(image.patches).to(weight.device, weight.dtype)
        made: Features = self._model.tower(patches, [image.grid])
        self._features[digest] = made
        self.passes += 1
        self._bytes += _size(made)
        while self._bytes > self._most_bytes and len(self._features) > 1:
            self._bytes -= _size(self._features.popitem(last=False)[1])
        return made


def _size(features: Features) -> int:
    return sum(tensor.nbytes for tensor in (features.last_FD, *features.deep))
