"""Training an adapter: only it changes, only it is published, and PEFT reads it and gives the same logits."""

from pathlib import Path

import pytest
import torch
from trainer_helpers import checkpoint_tensors, run_paths, run_ranks, small_settings, spool

from headway.models.attention import PackedPlan
from headway.models.checkpoints.folders import load_model
from headway.models.packed import PackedTokens
from headway.models.tiny import resolve_model
from headway.trainer.rl import train
from headway.transport.announcements import latest, read
from headway.transport.weights import make_receiver

LORA = {"model__lora__rank": 4, "model__lora__alpha": 8.0, "trainer__optim__lr": 1e-2}


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    model = load_model(folder)
    tokens = PackedTokens(torch.tensor(ids), torch.arange(len(ids)), PackedPlan([len(ids)]))
    with torch.no_grad():
        return model.logits(model(tokens).hidden_TD)


def test_an_adapter_run_publishes_and_exports_the_adapter(tmp_path: Path) -> None:
    paths = run_paths(tmp_path)
    spool(paths, range(1, 4))
    train(small_settings(max_steps=3, **LORA), paths)

    update = latest(paths)
    assert update is not None and update.version == 3 and update.adapter == "policy"
    sent = dict(make_receiver().receive(update))
    assert sent and all(".lora_A." in name or ".lora_B." in name for name in sent)
    assert any(tensor.any() for name, tensor in sent.items() if ".lora_B." in name)
    assert all(".lora_" in name for name in checkpoint_tensors(paths, 3))

    modes = {file.stat().st_mode for file in (paths.exports / "step_000003_adapter").iterdir()}
    assert len(modes) == 1, "whoever may read the config may read the weights"
    ids = [5, 60, 7, 80, 9]
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, paths.exports / "step_000003_adapter").eval()
    with torch.no_grad():
        theirs = adapted(torch.tensor([ids])).logits[0]
    merged = logits(paths.exports / "step_000003", ids)
    torch.testing.assert_close(merged, theirs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged, logits(resolve_model("tiny"), ids), atol=1e-3)


def test_an_adapter_run_resumes_bit_exactly_with_dropout(tmp_path: Path) -> None:
    straight, broken = run_paths(tmp_path / "straight"), run_paths(tmp_path / "broken")
    dropout = LORA | {"model__lora__dropout": 0.2}
    for paths in (straight, broken):
        spool(paths, range(1, 7))
    train(small_settings(max_steps=6, **dropout), straight)
    train(small_settings(max_steps=3, **dropout), broken)
    train(small_settings(max_steps=6, **dropout), broken)
    assert read(straight, 6).fingerprint == read(broken, 6).fingerprint


def train_on_two(folder: Path) -> None:
    train(small_settings(max_steps=2, placement__trainer_ranks=2, **LORA), run_paths(folder))


def test_two_ranks_train_the_same_adapter_as_one(tmp_path: Path) -> None:
    one, two = run_paths(tmp_path / "one"), run_paths(tmp_path / "two")
    spool(one, range(1, 3))
    spool(two, range(1, 3), ranks=2)
    train(small_settings(max_steps=2, **LORA), one)
    run_ranks(2, train_on_two, two.root)
    want, got = (dict(make_receiver().receive(read(paths, 2))) for paths in (one, two))
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-3, atol=1e-5)
    ids = [5, 60, 7, 80, 9]
    left, right = (logits(paths.exports / "step_000002", ids) for paths in (one, two))
    torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4)
