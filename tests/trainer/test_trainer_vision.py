"""Steps with images: packed micro-batches give the loss and the gradients of samples alone, whatever of the tower is
trained."""

import json
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from trainer_helpers import counts_of, run_ranks, small_settings

from headway.base.errors import HeadwayError, UsageError
from headway.config.shared import LoraSettings
from headway.core.batches import MicroBatch
from headway.core.images import Grid, TokenImages
from headway.core.samples import Sample
from headway.models.adapters.adaptable import adapters_of
from headway.models.adapters.lora import apply_lora, save_adapter
from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.checkpoints.folders import load_model, save_checkpoint
from headway.models.packed import ImageTokens, PackedTokens, Spans
from headway.models.registry import config_from_hf
from headway.models.vision.config import VisionConfig
from headway.models.vision.decoder import VisionLM
from headway.models.vision.inputs import image_tokens, put_on_cpu
from headway.models.vision.training import prepare_tower
from headway.trainer.inputs import prepare
from headway.trainer.parallel.context import ContextGroup, ContextShare
from headway.trainer.parallel.cutting import Cut
from headway.trainer.parallel.ranks import joined
from headway.trainer.parallel.sharding import full
from headway.trainer.state import TrainState, build_state
from headway.trainer.step import AsyncScalars, Stepper
from headway.transport.rollouts import RankBatch

CASES = Path(__file__).parents[1] / "models" / "families"
SAMPLES = [[Grid(1, 4, 4)], [], [Grid(1, 2, 2), Grid(1, 6, 4)], [Grid(1, 4, 4), Grid(1, 2, 6)], []]
"""The images of each sample; equal grids are the same image."""
MODELS = sorted(path.parent.name for path in CASES.glob("*/images.json"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in MODELS:
        hf = json.loads((CASES / name / "images.json").read_text())
        del hf["images"]
        model = build_model(config_from_hf(hf), seed=1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        found[name] = tmp_path_factory.mktemp("vision") / name
        save_checkpoint(model, found[name])
    return found


def make_sample(config: VisionConfig, grids: list[Grid], seed: int) -> Sample:
    draw = np.random.default_rng(seed)
    tower, start, images, uses = config.tower, 2, [], []
    for number, wanted in enumerate(grids):
        grid = tower.only_grid or wanted
        pixels = np.random.default_rng(wanted).standard_normal((grid.patches, tower.patch_numbers), dtype=np.float32)
        images.append((str(wanted), grid, pixels))
        uses.append((start, number))
        start += grid.patches // tower.merge**2 + 1
    sample = Sample.blank(start + 4)
    sample.token_ids = draw.integers(0, 50, len(sample), dtype=np.int32)
    sample.ce_weight = (draw.random(len(sample)) < 0.7).astype(np.float32)
    if grids:
        sample.images = TokenImages.of(images, uses)
        for token, number in uses:
            here = slice(token, token + images[number][1].patches // tower.merge**2)
            sample.token_ids[here] = config.image_token
            sample.ce_weight[here] = 0
    sample.ce_weight[0] = 0
    return sample


def make_batch(config: VisionConfig) -> tuple[list[Sample], RankBatch]:
    samples = [make_sample(config, grids, seed) for seed, grids in enumerate(SAMPLES)]
    micros = [MicroBatch.join(samples[:4]), MicroBatch.join(samples[4:])]
    assert micros[0].images is not None and len(micros[0].images.digests) == 4 and micros[1].images is None
    return samples, RankBatch(1, micros, counts_of(micros))


def reference_loss(model: VisionLM, samples: list[Sample]) -> torch.Tensor:
    """Cross-entropy of each sample in a pass of its own."""
    config = model.config
    assert isinstance(config, VisionConfig)
    total, count = torch.zeros(()), sum(int(np.count_nonzero(sample.ce_weight)) for sample in samples)
    for sample in samples:
        ids, plan = torch.from_numpy(sample.token_ids).long(), PackedPlan([len(sample)])
        seen = sample.images
        images = None if seen is None else image_tokens(seen, [len(sample)], config, put_on_cpu)
        logits = model.logits(model(PackedTokens(ids, plan.positions, plan, images=images)).hidden_TD)
        losses = F.cross_entropy(logits[:-1], ids[1:], reduction="none")
        total = total + (losses * torch.from_numpy(sample.ce_weight[1:])).sum()
    return total / count


def config_of(state: TrainState) -> VisionConfig:
    assert isinstance(state.config, VisionConfig)
    return state.config


@pytest.mark.parametrize("tower", ["frozen", "trained"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_samples_alone(name: str, tower: str, folders: dict[str, Path]) -> None:
    settings = small_settings(model__path=str(folders[name]), model__vision_tower=tower)
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        samples, batch = make_batch(config_of(state))
        sums = Stepper(settings, ranks)._accumulate(state, batch.micro_batches, batch.counts)
    model = load_model(folders[name])
    assert isinstance(model, VisionLM)
    loss = reference_loss(model, samples)
    loss.backward()
    assert abs(sums.values["loss"].item() - loss.item()) < 1e-5
    expected = dict(model.named_parameters())
    trained = dict(state.trained())
    seen = {name for name in expected if name.startswith("model.visual.")}
    assert trained.keys() == (expected.keys() if tower == "trained" else expected.keys() - seen)
    for key, parameter in trained.items():
        grad = expected[key].grad
        assert grad is not None and parameter.grad is not None
        assert (parameter.grad - grad).norm() <= 1e-4 * grad.norm() + 1e-6, key


@pytest.mark.parametrize("tower", ["frozen", "trained", "lora"])
def test_a_step_changes_what_is_trained_of_the_tower(tower: str, folders: dict[str, Path]) -> None:
    changes = {"model__vision_tower": tower, "trainer__optim__lr": 1e-2, "model__path": str(folders["qwen2_5_vl"])}
    if tower == "lora":
        changes |= {"model__lora__rank": 2, "model__lora__targets": ["q_proj", "qkv", "up_proj"]}
    settings = small_settings(**changes)
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        before = {name: parameter.detach().clone() for name, parameter in state.model.named_parameters()}
        _, batch = make_batch(config_of(state))
        report = Stepper(settings, ranks).step(state, batch)
    assert not report.skipped
    changed = {name for name, parameter in state.model.named_parameters() if not torch.equal(parameter, before[name])}
    in_tower = {name for name in changed if name.startswith("model.visual.")}
    assert changed - in_tower
    assert bool(in_tower) == (tower != "frozen")
    if tower == "lora":
        assert all(".lora_B" in name for name in changed)  # A moves once B is not zero
        assert {name.split(".")[-2] for name in in_tower} == {"qkv", "up_proj"}


def gradients_of_rank(folder: Path, context: int) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and gradients that are gathered. Ranks share micro-batches, or the second has one without images."""
    settings = small_settings(
        model__path=str(folder), placement__trainer_ranks=max(2, context), trainer__parallel__context=context
    )
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        batch = make_batch(config_of(state))[1]
        mine = batch.micro_batches if context > 1 else [batch.micro_batches[ranks.data_rank]]
        sums = Stepper(settings, ranks)._accumulate(state, mine, batch.counts)
        loss = sums.totals(ranks, AsyncScalars(sums.values).numbers())["loss"]
        return loss, {name: full(p.grad).numpy() for name, p in state.trained() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "context"), [("qwen3_vl", 1), ("qwen3_vl", 2), ("qwen3_vl", 3), ("gemma3", 2)])
def test_ranks_share_a_frozen_tower(name: str, context: int, folders: dict[str, Path]) -> None:
    """Three ranks do not divide the heads: each has two runs of tokens, and fetches keys."""
    results = run_ranks(max(2, context), gradients_of_rank, folders[name], context)
    model = load_model(folders[name])
    assert isinstance(model, VisionLM) and isinstance(model.config, VisionConfig)
    loss = reference_loss(model, make_batch(model.config)[0])
    loss.backward()
    trained = {name for name, _ in model.named_parameters() if not name.startswith("model.visual.")}
    for found, gradients in results:
        assert abs(found - loss.item()) < 1e-5 and gradients.keys() == trained
        for key, grad in gradients.items():
            expected = model.get_parameter(key).grad
            assert expected is not None
            assert np.linalg.norm(grad - expected.numpy()) <= 1e-4 * float(expected.norm()) + 1e-6, key


def hf_inputs(config: VisionConfig, ids: torch.Tensor, images: ImageTokens) -> dict[str, torch.Tensor]:
    """An image as transformers takes it: patches and their grid, or, where all images have one size, pixels."""
    kinds, tower = (ids == config.image_token).int()[None], config.tower
    if tower.only_grid is None:
        grids = torch.tensor(images.grids)
        return {"pixel_values": images.patches_PN, "image_grid_thw": grids, "mm_token_type_ids": kinds}
    side, features = tower.patch, tower.only_grid.rows // tower.merge
    cut = images.patches_PN.view(features, features, tower.merge, tower.merge, 3, side, side)
    pixels = cut.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, features * tower.merge * side, -1)
    return {"pixel_values": pixels, "token_type_ids": kinds}


@pytest.mark.parametrize(("name", "targets"), [("qwen3_vl", ["q_proj", "qkv"]), ("gemma3", ["q_proj", "fc1"])])
def test_an_adapter_with_the_tower_is_read_by_peft(
    name: str, targets: list[str], folders: dict[str, Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model = load_model(folders[name])
    prepare_tower(model, "lora")
    lora = LoraSettings(rank=2, targets=targets)
    apply_lora(model, lora)
    assert any(".visual." in weight.name for weight, _, _ in adapters_of(model))
    with torch.no_grad():
        for _, _, b in adapters_of(model):
            b.normal_(generator=torch.Generator().manual_seed(0))
    save_adapter(model, tmp_path / "adapter", lora, base=str(folders[name]))
    base = transformers.AutoModelForImageTextToText.from_pretrained(folders[name], dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert isinstance(model.config, VisionConfig)
    sample = make_sample(model.config, [Grid(1, 6, 4)], 0)
    ids, plan = torch.from_numpy(sample.token_ids).long(), PackedPlan([len(sample)])
    assert sample.images is not None
    images = image_tokens(sample.images, [len(sample)], model.config, put_on_cpu)
    with torch.no_grad():
        ours = model.logits(model(PackedTokens(ids, plan.positions, plan, images=images)).hidden_TD)
        theirs = adapted(input_ids=ids[None], **hf_inputs(model.config, ids, images)).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_what_does_not_fit_is_refused(folders: dict[str, Path]) -> None:
    settings = small_settings(model__path=str(folders["qwen3_vl"]))
    with joined(settings) as ranks:
        config = config_of(build_state(settings, ranks))
    micro = make_batch(config)[1].micro_batches[0]
    device = torch.device("cpu")
    prepare(micro, config, device)
    assert micro.images is not None
    text = config_from_hf(json.loads((CASES / "qwen3" / "plain.json").read_text()))
    with pytest.raises(HeadwayError, match="do not see"):
        prepare(micro, text, device)
    micro.token_ids[micro.token_ids == config.image_token] = 0
    with pytest.raises(HeadwayError, match="image tokens"):
        prepare(micro, config, device)
    micro.images.patches = micro.images.patches[:, :-1]
    with pytest.raises(HeadwayError, match="patches of"):
        prepare(micro, config, device)
    settings = small_settings(model__vision_tower="trained")
    with joined(settings) as ranks, pytest.raises(UsageError, match="no vision tower"):
        build_state(settings, ranks)
    cut = Cut((10,), parts=3, balanced=True)
    plan = ContextShare(cut, ContextGroup(0, 3, MagicMock()), device).plan
    with pytest.raises(HeadwayError, match=r"set trainer\.parallel\.context to a number"):
        plan.with_spans(Spans(torch.arange(cut.tokens), 4))
