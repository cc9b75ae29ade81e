"""Training by Hugging Face's own module: the oracle is Headway's code of the same model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from trainer_helpers import checkpoint_tensors, run_paths, run_ranks, small_settings, spool

from headway.base.errors import HeadwayError, UsageError
from headway.config.inference import ServeSettings
from headway.config.shared import ModelSettings
from headway.config.trainer import ActivationSettings
from headway.core.runs import RunPaths
from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.checkpoints.folders import read_tensors
from headway.models.ops.attention.layer import AttentionLayer
from headway.models.packed import PackedTokens
from headway.models.registry import find_family, load_config
from headway.models.tiny import resolve_model
from headway.trainer.memory.recompute import recompute_policy
from headway.trainer.rl import train
from headway.transport.announcements import latest
from headway.transport.weights import make_receiver

CASES = Path(__file__).parents[1] / "models" / "families" / "transformers"
STEPS = 2
SGD = {"max_steps": STEPS, "trainer__optim": {"type": "sgd", "lr": 0.1}}
FULL = {"trainer__activations__checkpoint": "full"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(folder: Path, ranks: int = 1, **changes: Any) -> RunPaths:
    """A run of two steps on batches that are the same for all."""
    paths = run_paths(folder)
    spool(paths, range(1, STEPS + 1), ranks)
    if ranks == 1:
        train(small_settings(**SGD, **changes), paths)
    else:
        run_ranks(ranks, train_one_rank, str(folder), ranks, changes)
    return paths


def train_one_rank(folder: str, ranks: int, changes: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    train(small_settings(placement__trainer_ranks=ranks, **SGD, **changes), RunPaths(Path(folder)))


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name} {text}"
        )


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run of Headway's own code."""
    return trained(tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize(("ranks", "changes"), [(1, {}), (1, FULL), (2, FULL)])
def test_it_learns_what_headways_own_code_learns(
    own: RunPaths, tmp_path: Path, ranks: int, changes: dict[str, Any]
) -> None:
    """Alone and sharded over ranks, with activations kept and recomputed; published under Hugging Face's names."""
    paths = trained(tmp_path, ranks, model__implementation="transformers", **changes)
    step = f"step_{STEPS:06d}"
    expected, before = dict(read_tensors(own.exports / step)), dict(read_tensors(resolve_model("tiny")))
    assert_same(dict(read_tensors(paths.exports / step)), expected)
    assert max(float((expected[name] - before[name]).abs().max()) for name in before) > 1e-3
    update = latest(paths)
    assert update is not None and update.version == STEPS and update.probe is not None
    assert_same(dict(make_receiver().receive(update)), expected)
    assert load_config(paths.exports / step) == load_config(own.exports / step)


def test_an_adapter_learns_the_same(tmp_path: Path) -> None:
    lora = {"model__lora__rank": 4, "model__lora__alpha": 8.0}
    ours, theirs = (
        trained(tmp_path / implementation, model__implementation=implementation, **lora)
        for implementation in ("headway", "transformers")
    )
    assert_same(checkpoint_tensors(theirs, STEPS), checkpoint_tensors(ours, STEPS))
    merged = [dict(read_tensors(paths.exports / f"step_{STEPS:06d}")) for paths in (theirs, ours)]
    assert_same(*merged)


def test_a_run_resumes(own: RunPaths, tmp_path: Path) -> None:
    paths = run_paths(tmp_path)
    spool(paths, range(1, STEPS + 1))
    for steps in range(1, STEPS + 1):
        train(small_settings(**SGD | {"max_steps": steps}, model__implementation="transformers"), paths)
    step = f"step_{STEPS:06d}"
    assert_same(dict(read_tensors(paths.exports / step)), dict(read_tensors(own.exports / step)))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("trainer__parallel__context", 2),
        ("trainer__parallel__expert", 2),
        ("trainer__experts__balance", "loss"),
        ("trainer__activations__checkpoint", "selective"),
        ("trainer__compile", True),
        ("model__compute", "fp8"),
        ("model__family", "mine.py:Mine"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(setting: str, value: object) -> None:
    with pytest.raises(ValidationError, match=setting.rpartition("__")[2]):
        small_settings(model__implementation="transformers", placement__trainer_ranks=2, **{setting: value})


def test_fp8_engines_are_refused() -> None:
    model = ModelSettings(implementation="transformers")
    with pytest.raises(ValidationError, match=r"inference\.compute"):
        ServeSettings.model_validate({"model": model.model_dump(), "inference": {"compute": "fp8"}})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "fantasy"}, "no causal language model 'fantasy'"),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
            "of the kinds conv",
        ),
        ({"model_type": "mamba"}, "MambaForCausalLM of transformers does not let"),
        ({"model_type": "bloom"}, "BloomForCausalLM of transformers does not let"),
    ],
)
def test_models_that_cannot_be_packed_are_refused_by_name(tmp_path: Path, values: dict[str, Any], reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UsageError, match=reason):
        load_config(tmp_path, "transformers")


def test_an_unknown_family_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    with pytest.raises(UsageError, match=r'set model\.implementation = "transformers"'):
        load_config(tmp_path)


def test_the_first_pass_refuses_a_module_in_which_samples_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions over tokens are refused by name; here as if nobody knew of them."""
    monkeypatch.setattr("headway.models.configs.transformers.ATTENTION_LAYERS", {"conv", "full_attention"})
    values = {
        "model_type": "lfm2",
        "vocab_size": 67,
        "hidden_size": 48,
        "intermediate_size": 80,
        "initializer_range": 0.5,
    }
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}
    config = find_family("transformers").config_from_hf(values | layers | {"num_attention_heads": 4})
    model, plan = build_model(config), PackedPlan([5])
    with pytest.raises(HeadwayError, match="packed samples get other logits than transformers' Lfm2ForCausalLM"):
        model(PackedTokens(torch.arange(5), plan.positions, plan))


class CountingPlan(PackedPlan):
    """Counts how often layers attend."""

    calls = 0

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: AttentionLayer) -> Tensor:
        self.calls += 1
        return super().attend(q_THD, k_TKD, v_TKD, layer)


@pytest.mark.parametrize(("checkpoint", "times"), [("off", 1), ("full", 2)])
def test_activations_are_recomputed_where_that_is_asked(checkpoint: str, times: int) -> None:
    config = load_config(resolve_model("tiny"), "transformers")
    settings = ActivationSettings.model_validate({"checkpoint": checkpoint})
    model = build_model(config, recompute=recompute_policy(settings, config.layers))
    plan = CountingPlan([5, 3])
    model(PackedTokens(torch.arange(8), plan.positions, plan)).hidden_TD.sum().backward()
    assert plan.calls == times * config.layers


@pytest.mark.parametrize("case", sorted(CASES.glob("*.json")), ids=lambda case: case.stem)
def test_it_computes_in_bfloat16_from_float32_weights(case: Path) -> None:
    config = find_family("transformers").config_from_hf(json.loads(case.read_text()))
    model, rounded = build_model(config), build_model(config, compute_dtype=torch.bfloat16)
    plan = PackedPlan([9, 1, 30])
    tokens = PackedTokens(torch.arange(40), plan.positions, plan)
    exact_TD, hidden_TD = model(tokens).hidden_TD, rounded(tokens).hidden_TD
    assert hidden_TD.dtype == torch.bfloat16
    assert float((hidden_TD - exact_TD).norm() / exact_TD.norm()) < 0.02
    rounded.logits(hidden_TD).logsumexp(-1).sum().backward()
    assert {p.grad.dtype for p in rounded.parameters() if p.grad is not None} == {torch.float32}
