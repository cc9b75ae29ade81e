"""Places of images among tokens: positions are those of transformers, and an image is held once."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.base.errors import HeadwayError, UsageError
from headway.core.batches import Batch, ComponentCounts, MicroBatch
from headway.core.images import Grid, TokenImages, join_images
from headway.core.samples import Sample
from headway.core.wire import decode, encode
from headway.models.build import build_model
from headway.models.checkpoints.tensors import hf_tensors, load_hf_tensors
from headway.models.costs import parameter_count
from headway.models.registry import config_from_hf
from headway.models.vision.config import VisionConfig
from headway.models.vision.family import VisionFamily
from headway.models.vision.inputs import image_tokens, put_on_cpu
from headway.models.vision.places import expand_placeholders, feature_count, feature_places, packed_positions

FAMILIES = Path(__file__).parent / "families"
IMAGE = 60
GRIDS = st.tuples(st.just(1), st.integers(1, 4), st.integers(1, 4)).map(lambda g: Grid(1, 2 * g[1], 2 * g[2]))


def images_of(grids: list[Grid], starts: list[int], numbers: int = 5) -> TokenImages:
    drawn = np.random.default_rng(0)
    every = [(str(n), g, drawn.random((g.patches, numbers), dtype=np.float32)) for n, g in enumerate(grids)]
    return TokenImages.of(every, list(zip(starts, range(len(grids)), strict=True)))


@settings(max_examples=40, deadline=None)
@given(gaps=st.lists(st.tuples(st.integers(1, 5), GRIDS), min_size=1, max_size=4), rest=st.integers(0, 5))
def test_positions_are_those_of_transformers(gaps: list[tuple[int, Grid]], rest: int) -> None:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    tokens = [token for gap, _ in gaps for token in (*[7] * gap, IMAGE)] + [7] * rest
    ids, starts = expand_placeholders(tokens, IMAGE, [grid.patches // 4 for _, grid in gaps])
    images = images_of([grid for _, grid in gaps], starts)
    assert np.array_equal(feature_places(images, 2)[0], np.flatnonzero(np.asarray(ids) == IMAGE))
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = lambda *args, **named: Qwen3VLModel.get_vision_position_ids(model, *args, **named)
    input_ids = torch.tensor([ids])
    theirs, _ = Qwen3VLModel.get_rope_index(
        model, input_ids, (input_ids == IMAGE).int(), torch.from_numpy(images.grids).long()
    )
    assert np.array_equal(packed_positions([len(ids)], images, 2), theirs[:, 0].numpy())


def test_an_image_is_held_once_however_many_samples_show_it() -> None:
    def sample(images: TokenImages | None) -> Sample:
        blank = Sample.blank(9)
        blank.images = images
        return blank

    one, two = Grid(1, 2, 4), Grid(1, 4, 2)
    first, both = images_of([one], [3]), images_of([one, two], [1, 5])
    both.patches[:8] = first.patches
    micro = MicroBatch.join([sample(first), sample(None), sample(both), sample(first)])
    assert micro.images is not None
    assert micro.images.digests == ["0", "1"] and len(micro.images.patches) == 16
    assert micro.images.uses.tolist() == [[3, 0], [19, 0], [23, 1], [30, 0]]
    assert MicroBatch.join([sample(None)]).images is None and join_images([(3, None)]) is None

    batch = Batch(1, [[micro]], ComponentCounts())
    again = decode(Batch, encode(batch))
    assert again.digest() == batch.digest()
    again.ranks[0][0].images.patches[3, 2] += 1
    assert again.digest() != batch.digest()


def test_what_contradicts_itself_is_refused() -> None:
    images = images_of([Grid(1, 4, 4)], [3])
    images.check(9)
    with pytest.raises(HeadwayError, match="below 3"):
        images.check(3)
    with pytest.raises(HeadwayError, match="ends at token 7"):
        packed_positions([6], images, 2)
    with pytest.raises(HeadwayError, match="inside of the one before"):
        packed_positions([20], images_of([Grid(1, 4, 4), Grid(1, 2, 2)], [3, 5]), 2)
    with pytest.raises(HeadwayError, match="2 images, but 1 image tokens"):
        expand_placeholders([1, IMAGE], IMAGE, [1, 2])
    images.grids = images.grids + 2
    with pytest.raises(HeadwayError, match="add up"):
        images.check(9)


@pytest.mark.parametrize("case", ["qwen2_5_vl/images", "qwen3_vl/images"])
def test_both_forms_of_config_json_are_read(case: str) -> None:
    """Older checkpoints hold the text model's settings beside the others, and call its rotary positions `mrope`."""
    hf = json.loads((FAMILIES / f"{case}.json").read_text())
    del hf["images"]
    nested = config_from_hf(hf)
    text = hf.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = {**hf, **text, "rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    assert config_from_hf(flat) == nested
    for part in (hf["vision_config"], hf):
        with pytest.raises(UsageError, match="attention_fantasy"):
            config_from_hf({**flat, "vision_config": dict(hf["vision_config"]), **_fantasy(part, hf)})


def _fantasy(part: dict[str, object], hf: dict[str, object]) -> dict[str, object]:
    if part is hf:
        return {"attention_fantasy": 3}
    return {"vision_config": {**part, "attention_fantasy": 3}}


def test_interleaved_axes_are_those_of_released_models() -> None:
    from headway.models.registry import find_family

    family = find_family("qwen3_vl")
    assert isinstance(family, VisionFamily)
    hf = json.loads((FAMILIES / "qwen3_vl/images.json").read_text())
    hf["text_config"] |= {"head_dim": 128, "rope_parameters": {"mrope_section": [24, 20, 20]}}
    del hf["images"]
    config = config_from_hf(hf)
    assert isinstance(config, VisionConfig)
    axes = family.rotary_axes(config)
    assert axes[:64] == axes[64:] == [0, 1, 2] * 20 + [0] * 4


GEMMA3_4B = {
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
"""The released one, which leaves the rest to defaults."""


def test_a_released_config_of_gemma3_is_read() -> None:
    config = config_from_hf(GEMMA3_4B)
    assert isinstance(config, VisionConfig)
    assert config.tower.only_grid == Grid(1, 64, 64) and feature_count(Grid(1, 64, 64), config.tower.merge) == 256
    assert (config.image_token, config.vision_start_token, config.vision_end_token) == (262144, 255999, 256000)
    assert config.eos_ids == (1, 106) and config.tied and config.rope_scaling is not None
    assert parameter_count(config) == 4_300_079_472
    with pytest.raises(UsageError, match="does not divide a square"):
        config_from_hf(GEMMA3_4B | {"mm_tokens_per_image": 250})
    with pytest.raises(UsageError, match="vision_use_head"):
        config_from_hf(GEMMA3_4B | {"vision_config": GEMMA3_4B["vision_config"] | {"vision_use_head": True}})


def test_both_names_of_the_tower_of_gemma3_are_read() -> None:
    """Released checkpoints have one more level of names than transformers 5 writes."""
    hf = json.loads((FAMILIES / "gemma3/images.json").read_text())
    del hf["images"]
    saved, loaded = (build_model(config_from_hf(hf), seed=seed) for seed in (1, 2))
    tensors = [(name.replace("vision_tower.", "vision_tower.vision_model.", 1), x) for name, x in hf_tensors(saved)]
    load_hf_tensors(loaded, tensors)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, saved.get_parameter(name)), name


@pytest.mark.parametrize("case", ["qwen3_vl/images", "gemma3/images"])
def test_ranks_that_share_samples_get_the_images_of_their_tokens(case: str) -> None:
    """An image that is cut goes to both ranks; a rank may have none."""
    hf = json.loads((FAMILIES / f"{case}.json").read_text())
    del hf["images"]
    config = config_from_hf(hf)
    assert isinstance(config, VisionConfig)
    grid = Grid(1, 4, 4)
    images = images_of([grid, grid, grid], [2, 8, 14])  # of four tokens each
    lengths = [13, 19]
    whole = image_tokens(images, lengths, config, put_on_cpu)
    found = []
    for start, end, used in ((0, 4, [0]), (4, 10, [0, 1]), (10, 20, [1, 2]), (20, 32, list[int]())):
        rows = np.arange(start, end)
        own = image_tokens(images, lengths, config, put_on_cpu, rows)
        assert len(own.grids) == len(used) and len(own.patches_PN) == 16 * len(used)
        for token, feature in zip(own.tokens_U.tolist(), own.features_U.tolist(), strict=True):
            found.append((int(rows[token]), 4 * used[feature // 4] + feature % 4))
        if len(used):
            assert np.array_equal(own.patches_PN.numpy(), np.concatenate([images.split()[image] for image in used]))
        if whole.positions_3T is not None:
            assert own.positions_3T is not None and torch.equal(own.positions_3T, whole.positions_3T[:, rows])
        if whole.spans is not None:
            assert own.spans is not None and torch.equal(own.spans.last_T, whole.spans.last_T)
    assert found == list(zip(whole.tokens_U.tolist(), whole.features_U.tolist(), strict=True))
