"""Steps of sequences with images, as a device needs to know them: whether they show images, and by how much their text
is shifted where they don't."""

import numpy as np
import pytest
import torch
from test_engine_images import GRIDS, make_model, make_prompt

from headway.core.protocol import SamplingParams
from headway.inference.embedded.inputs.layout import StepLayout
from headway.inference.embedded.running.images import StepImages
from headway.inference.embedded.scheduling.sequence import Sequence
from headway.models.vision.places import sample_positions


def layout_of(start: int, count: int) -> StepLayout:
    rows, starts, counts = np.array([0]), np.array([start]), np.array([count])
    return StepLayout(np.zeros((1, 8), np.int64), rows, starts, counts, np.arange(start, start + count), rows == 0)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_text_after_the_last_image_is_one_shift_away_from_its_places(name: str) -> None:
    model = make_model(name)
    tokens, served = make_prompt(model, GRIDS, seed=2)
    length = len(tokens) + 4
    sequence = Sequence(
        "r", 0, (0, 0, 0), tokens, len(tokens), SamplingParams(), seed=0, limit=length, stops=frozenset(), row=0,
        images=served,
    )  # fmt: skip
    images = StepImages(model, 1)
    images.enter(sequence)
    config = model.config
    places = [(image.use.at, image.grid) for image in served]
    positions = sample_positions(length, places, config.tower.merge)  # type: ignore[attr-defined]
    end = served[-1].use.at + served[-1].use.tokens
    for start in range(length):
        layout = layout_of(start, length - start)
        assert images.shows(layout) == (start < end)
        if start >= end:
            assert (layout.positions_T + images.shift(0) == positions[:, start:]).all()


def test_the_tower_computes_the_images_of_a_step_together_and_each_once() -> None:
    model = make_model("qwen3_vl")
    images, alone = StepImages(model, 1), StepImages(model, 1)
    _, served = make_prompt(model, GRIDS, seed=3)
    calls: list[int] = []
    model.tower.register_forward_pre_hook(lambda _, given: calls.append(len(given[1])))
    with torch.inference_mode():
        together = images._features_of([*served, served[0]])
        assert calls == [3] and images.passes == 3
        images._features_of(served)
        assert calls == [3]
        for image in served:
            own = alone._features_of([image])[image.use.digest]
            found = together[image.use.digest]
            torch.testing.assert_close(found.last_FD, own.last_FD, atol=1e-5, rtol=1e-5)
            for level, expected in zip(found.deep, own.deep, strict=True):
                torch.testing.assert_close(level, expected, atol=1e-5, rtol=1e-5)


def test_many_images_go_to_the_tower_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.inference.embedded.running.images.MOST_PATCHES", 30)
    model = make_model("qwen2_5_vl")
    images = StepImages(model, 1, most_bytes=1)
    _, served = make_prompt(model, GRIDS, seed=4)
    calls: list[int] = []
    model.tower.register_forward_pre_hook(lambda _, given: calls.append(len(given[1])))
    with torch.inference_mode():
        found = images._features_of(served)
    assert calls == [2, 1], "16 and 12 patches, then 24"
    assert len(found) == 3 and len(images._features) == 1
