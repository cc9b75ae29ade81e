"""Several LoRA tenants on one trainer: each ends with the bits of a run by itself, whoever else is there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainer_helpers import counts_of, rich_micro_batch, small_settings, vocab_of

from headway.base.errors import DamagedError, UsageError
from headway.config.trainer import TrainSettings
from headway.models.adapters.lora import adapter_tensors
from headway.models.adapters.peft import read_adapter
from headway.trainer.parallel.ranks import joined
from headway.trainer.state import build_state
from headway.trainer.step import Stepper
from headway.trainer.tenants.tenant import TenantError, TenantLimits, TenantReport
from headway.trainer.tenants.trainer import TenantTrainer
from headway.transport.rollouts import RankBatch

FOUR: dict[str, dict[str, Any]] = {
    "anna": {"model__lora__rank": 1, "trainer__loss__type": "dppo", "trainer__optim__lr": 1e-2},
    "ben": {
        "model__lora__rank": 4,
        "trainer__loss__type": "gspo",
        "trainer__optim": {"type": "sgd", "lr": 0.3, "momentum": 0.9},
        "trainer__schedule": {"type": "cosine", "warmup_steps": 2},
    },
    "cora": {
        "model__lora__rank": 7,
        "model__lora__targets": ["q_proj", "down_proj"],
        "trainer__loss__type": "ppo_clip",
        "trainer__optim": {"type": "muon", "lr": 3e-3},
        "trainer__entropy_coef": 0.01,
    },
    "dan": {
        "model__lora__rank": 3,
        "trainer__loss__type": "cispo",
        "trainer__optim__lr": 3e-3,
        "trainer__max_grad_norm": 0.05,
        "trainer__sequence_mask": {},
    },
}
LENGTHS: Mapping[str, Sequence[Sequence[int]]] = {
    "anna": [[9, 17, 4], [24, 5]],
    "ben": [[30]],
    "cora": [[3, 3, 12, 8], [1, 2], [11]],
    "dan": [[19], [7, 7, 7]],
}


def tenant_settings(model: str = "tiny", **changes: Any) -> TrainSettings:
    return small_settings(model__path=model, max_steps=6, **changes)


def make_batch(step: int, lengths: Sequence[Sequence[int]], seed: int, model: str = "tiny") -> RankBatch:
    micros = [rich_micro_batch(list(n), vocab_of(model), 1000 * seed + 10 * step + i) for i, n in enumerate(lengths)]
    return RankBatch(step, micros, counts_of(micros))


def batches_of(name: str, steps: range = range(1, 4)) -> list[RankBatch]:
    return [make_batch(step, LENGTHS[name], seed=sorted(FOUR).index(name)) for step in steps]


def alone(own: TrainSettings, batches: Sequence[RankBatch]) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The adapter and the metrics of an ordinary run."""
    with joined(own) as ranks:
        state, stepper = build_state(own, ranks), Stepper(own, ranks)
        metrics = [stepper.step(state, batch).metrics for batch in batches]
        return {name: tensor.detach().clone() for name, tensor in adapter_tensors(state.model)}, metrics


def adapter_of(trainer: TenantTrainer, name: str) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in trainer.tenants[name].adapter.peft_tensors()}


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def host(seq_len: int = 64, model: str = "tiny", apart: bool | None = None, **changes: Any) -> TenantTrainer:
    return TenantTrainer(tenant_settings(model, seq_len=seq_len, **changes), apart=apart)


def train_all(trainer: TenantTrainer, batches: Mapping[str, Sequence[RankBatch]]) -> list[TenantReport]:
    """Submit batches as early as is allowed, and run passes until all are trained."""
    rest = {name: list(own) for name, own in batches.items()}
    reports: list[TenantReport] = []
    while any(rest.values()) or any(tenant.waiting for tenant in trainer.tenants.values()):
        for name, own in rest.items():
            while own and len(trainer.tenants[name].waiting) < TenantLimits().waiting_batches:
                trainer.submit(name, own.pop(0))
        reports += trainer.run_pass()
    return reports


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[dict[str, Tensor], list[dict[str, float]]]]:
    return {name: alone(tenant_settings(**changes), batches_of(name)) for name, changes in FOUR.items()}


@pytest.mark.parametrize("recompute", ["off", "selective"])
def test_four_tenants_end_with_the_bits_of_four_runs(
    recompute: str, expected: dict[str, tuple[dict[str, Tensor], list[dict[str, float]]]]
) -> None:
    trainer = host(trainer__activations__checkpoint=recompute)
    for name, changes in FOUR.items():
        trainer.join(name, tenant_settings(**changes))
    reports = train_all(trainer, {name: batches_of(name) for name in FOUR})
    if recompute == "selective":
        changes = FOUR["anna"] | {"trainer__activations__checkpoint": recompute}
        expected = expected | {"anna": alone(tenant_settings(**changes), batches_of("anna"))}
    for name in FOUR if recompute == "off" else ["anna"]:
        adapter, metrics = expected[name]
        assert same(adapter_of(trainer, name), adapter), name
        own = [report.metrics for report in reports if report.tenant == name]
        assert len(own) == 3 and [report.step for report in reports if report.tenant == name] == [1, 2, 3]
        for ours, theirs in zip(own, metrics, strict=True):
            assert {key: ours[key] for key in theirs if key != "step_seconds"} == {
                key: value for key, value in theirs.items() if key != "step_seconds"
            }


def test_products_over_all_rows_give_the_same_up_to_rounding(
    expected: dict[str, tuple[dict[str, Tensor], list[dict[str, float]]]],
) -> None:
    trainer = host(seq_len=256, apart=False)
    for name, changes in FOUR.items():
        trainer.join(name, tenant_settings(**changes))
    train_all(trainer, {name: batches_of(name)[:1] for name in FOUR})
    for name, changes in FOUR.items():
        adapter, _ = alone(tenant_settings(**changes), batches_of(name)[:1])
        for key, tensor in adapter_of(trainer, name).items():
            torch.testing.assert_close(tensor, adapter[key], rtol=1e-3, atol=1e-5)


def test_a_tenant_that_sends_nothing_holds_up_nobody() -> None:
    trainer = host()
    for name, changes in FOUR.items():
        trainer.join(name, tenant_settings(**changes))
    reports = train_all(trainer, {"ben": batches_of("ben")})
    assert [(report.tenant, report.step) for report in reports] == [("ben", 1), ("ben", 2), ("ben", 3)]
    assert trainer.tenants["anna"].step == 0


def test_tenants_that_join_and_leave_half_way_change_nobody_elses_bits(
    expected: dict[str, tuple[dict[str, Tensor], list[dict[str, float]]]],
) -> None:
    trainer = host()
    for name in ("anna", "ben"):
        trainer.join(name, tenant_settings(**FOUR[name]))
    for name in ("anna", "ben"):
        trainer.submit(name, batches_of(name)[0])
    trainer.run_pass()  # anna's first batch is half trained, perhaps
    trainer.join("cora", tenant_settings(**FOUR["cora"]))
    trainer.leave("ben")
    train_all(trainer, {"cora": batches_of("cora"), "anna": batches_of("anna")[1:]})
    for name in ("anna", "cora"):
        assert same(adapter_of(trainer, name), expected[name][0]), name
    with pytest.raises(TenantError, match='tenant "ben": is not here; tenants are: anna, cora'):
        trainer.submit("ben", batches_of("ben")[1])


def test_a_tenant_continues_elsewhere_from_its_checkpoint(
    tmp_path: Path, expected: dict[str, tuple[dict[str, Tensor], list[dict[str, float]]]]
) -> None:
    first, second = host(), host()
    names = ("ben", "cora")  # momentum, Muon
    for name in names:
        first.join(name, tenant_settings(**FOUR[name]))
    train_all(first, {name: batches_of(name)[:2] for name in names})
    for name in names:
        first.save(name, tmp_path / name)
        assert second.join(name, tenant_settings(**FOUR[name]), tmp_path / name).step == 2
    train_all(second, {name: batches_of(name)[2:] for name in names})
    for name in names:
        assert same(adapter_of(second, name), expected[name][0]), name
    lora, tensors = read_adapter(tmp_path / "cora" / "adapter")
    assert lora.rank == 7 and same(tensors, adapter_of(first, "cora"))

    with pytest.raises(UsageError, match="lora rank 4 instead of 5"):
        second.join("other", tenant_settings(model__lora__rank=5), tmp_path / "ben")
    (tmp_path / "ben" / "optimizer.safetensors").write_bytes(b"no")
    with pytest.raises(DamagedError, match="ben is damaged"):
        second.join("other", tenant_settings(**FOUR["ben"]), tmp_path / "ben")
    assert set(second.tenants) == {"ben", "cora"}


def broken(step: int, **streams: float) -> RankBatch:
    """A batch with one number of a stream replaced."""
    batch = make_batch(step, [[5, 9]], seed=9)
    for name, value in streams.items():
        stream = getattr(batch.micro_batches[0], name)
        stream[np.flatnonzero(batch.micro_batches[0].sampled)[-1]] = value
    return batch


def test_hostile_batches_are_refused_or_skipped_and_the_others_untouched(
    expected: dict[str, tuple[dict[str, Tensor], list[dict[str, float]]]],
) -> None:
    trainer = host()
    trainer.join("anna", tenant_settings(**FOUR["anna"]))
    trainer.join("mallory", tenant_settings(model__lora__rank=2, trainer__loss__type="aipo"))
    before = adapter_of(trainer, "mallory")
    refused = {
        "advantages holds NaN": broken(1, advantages=np.nan),
        "logprobs holds infinity": broken(1, logprobs=-np.inf),
        "token_ids holds 999999": broken(1, token_ids=999_999),
        "a micro-batch has 65 tokens, and a forward pass here 64": make_batch(1, [[65]], seed=9),
        "the next batch is number 1": broken(2),
        "counts.rl is": RankBatch(1, broken(1).micro_batches, counts_of([])),
        "no micro-batches": RankBatch(1, [], counts_of([])),
    }
    for message, batch in refused.items():
        with pytest.raises(TenantError, match=f'tenant "mallory": batch {batch.step} is refused: .*{message}'):
            trainer.submit("mallory", batch)
    trainer.submit("mallory", broken(1, advantages=3e38))
    trainer.submit("mallory", broken(2, advantages=3e38))
    with pytest.raises(TenantError, match="2 batches are waiting already"):
        trainer.submit("mallory", broken(3))

    reports = train_all(trainer, {"anna": batches_of("anna")})
    assert same(adapter_of(trainer, "anna"), expected["anna"][0])
    own = [report for report in reports if report.tenant == "mallory"]
    assert [(report.step, report.skipped, report.metrics["refused"]) for report in own] == [(1, True, 8), (2, True, 8)]
    assert same(adapter_of(trainer, "mallory"), before)

    trainer.submit("mallory", broken(3, advantages=3e38))
    assert "3 steps in a row were not finite" in str(trainer.run()[-1].error)
    with pytest.raises(TenantError, match="the tenant was stopped"):
        trainer.submit("mallory", broken(4))


def failing_loss(inputs: Any) -> Any:
    raise ValueError("an error in somebody's loss")


def test_a_loss_that_fails_stops_its_tenant_alone(
    expected: dict[str, tuple[dict[str, Tensor], list[dict[str, float]]]],
) -> None:
    trainer = host()
    trainer.join("anna", tenant_settings(**FOUR["anna"]))
    own_loss = {"type": "custom", "path": f"{__file__}:failing_loss"}
    trainer.join("mallory", tenant_settings(model__lora__rank=2, trainer__loss=own_loss))
    reports = train_all(trainer, {"mallory": [broken(1)], "anna": batches_of("anna")})
    (stopped,) = (report for report in reports if report.tenant == "mallory")
    assert stopped.error == "its loss failed: ValueError: an error in somebody's loss"
    assert same(adapter_of(trainer, "anna"), expected["anna"][0])


def test_tenants_that_do_not_fit_are_refused() -> None:
    trainer = TenantTrainer(tenant_settings(), limits=TenantLimits(tenants=1, rank=8))
    refused: dict[str, tuple[str, dict[str, Any]]] = {
        "model.lora is missing": ("a", {}),
        "rank must be at most 8 here": ("a", {"model__lora__rank": 9}),
        "model.path must be that of the trainer, 'tiny'": ("a", {"model__lora__rank": 2, "model": "tiny-llama"}),
        "the name must be": ("../a", {"model__lora__rank": 2}),
    }
    for message, (name, changes) in refused.items():
        with pytest.raises(TenantError, match=message):
            trainer.join(name, tenant_settings(**changes))
    with pytest.raises(TenantError, match=r'tenant "a": .*dropout must be 0'):
        trainer.join("a", tenant_settings(model__lora__rank=2, model__lora__dropout=0.1))
    trainer.join("a", tenant_settings(model__lora__rank=2))
    with pytest.raises(TenantError, match="has joined already"):
        trainer.join("a", tenant_settings(model__lora__rank=2))
    with pytest.raises(TenantError, match="no place for more"):
        trainer.join("b", tenant_settings(model__lora__rank=2))
    with pytest.raises(UsageError, match=r"does not have placement\.trainer_ranks"):
        TenantTrainer(tenant_settings(placement__trainer_ranks=2))


LOSSES = ["dppo", "ipo", "aipo", "ppo_clip", "cispo", "gspo", "tis", "icepop"]
DRAWN = st.fixed_dictionaries(
    {
        "rank": st.integers(1, 9),
        "loss": st.sampled_from(LOSSES),
        "lr": st.sampled_from([1e-3, 1e-2]),
        "batches": st.lists(
            st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=1, max_size=3),
            min_size=1,
            max_size=2,
        ),
    }
)


@settings(max_examples=6, deadline=None)
@given(
    drawn=st.lists(DRAWN, min_size=2, max_size=4),
    seq_len=st.integers(36, 120),
    model=st.sampled_from(["tiny", "tiny-moe"]),
)
def test_nothing_depends_on_who_else_is_there(drawn: list[dict[str, Any]], seq_len: int, model: str) -> None:
    """Any tenants, packed with any others in passes of any size, get the bits that each gets alone."""

    def train(numbers: Sequence[int], tokens: int) -> list[dict[str, Tensor]]:
        trainer = host(tokens, model)
        batches = {}
        for number in numbers:
            own = drawn[number]
            changes = {f"trainer__{key}": own[name] for key, name in (("loss__type", "loss"), ("optim__lr", "lr"))}
            trainer.join(f"t{number}", tenant_settings(model, model__lora__rank=own["rank"], **changes))
            made = [make_batch(step, lengths, number, model) for step, lengths in enumerate(own["batches"], start=1)]
            batches[f"t{number}"] = made
        train_all(trainer, batches)
        return [adapter_of(trainer, f"t{number}") for number in numbers]

    together = train(range(len(drawn)), seq_len)
    for number, found in enumerate(together):
        (by_itself,) = train([number], 36)
        assert same(found, by_itself)
