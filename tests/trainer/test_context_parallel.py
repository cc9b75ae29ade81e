"""Context parallelism over real processes: what several ranks compute together of a micro-batch that they share is what
one rank computes of it alone."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from trainer_helpers import counts_of, rich_micro_batch, run_ranks, small_settings

from headway.core.batches import MicroBatch
from headway.models.attention import PackedPlan
from headway.models.build import build_model
from headway.models.checkpoints.folders import save_checkpoint
from headway.models.configs.config import ModelConfig
from headway.models.packed import Recurrence, States
from headway.models.registry import config_from_hf, load_config, register_family
from headway.models.tiny import resolve_model
from headway.trainer.parallel.context import ContextGroup, ContextShare
from headway.trainer.parallel.cutting import Cut, first_key
from headway.trainer.parallel.dims import ParallelDims
from headway.trainer.parallel.layout import Layout, Recompute
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.parallel.sharding import fill, full
from headway.trainer.state import TrainState, build_state
from headway.trainer.step import Stepper
from headway.transport.rollouts import RankBatch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from outside_family import SinkMoe, SinkMoeConfig

FAMILY = f"{Path(__file__).parents[1] / 'models' / 'outside_family.py'}:SinkMoe"
LENGTHS = [[9, 17, 4], [24, 5], [2], [3, 3, 12, 8, 1, 1]]
"""Samples that straddle parts, are shorter than one, and leave parts without any; 30, 29, 2 and 28 tokens."""
HYBRIDS = {"qwen3_next": "qwen3_next/dense_layers.json", "nemotron_h": "nemotron_h/dense.json"}
METRICS = ("loss", "entropy", "mismatch_kl", "tokens", "packed_tokens", "sampled_tokens", "flops", "grad_norm")


@dataclass(frozen=True)
class Case:
    """Settings of a trainer, as `small_settings` takes them, and whether routing is replayed."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    replay: bool = False


def compute(work: list[tuple[ParallelDims, Case]]) -> list[dict[str, Any]]:
    """The outcome of each case under its layout, in this rank's group."""
    with joined(small_settings(placement__trainer_ranks=work[0][0].world_size)) as group:
        return [outcome(case, replace(group, dims=dims)) for dims, case in work]


def outcome(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Gradients, metrics, logprobs and expert loads of a step from the start, and the weights after it."""
    optimizer = {"type": "sgd", "lr": 0.5, "momentum": 0.9}
    settings = small_settings(**{"trainer__optim": optimizer, "trainer__head_chunk": 7, **case.changes})
    state = build_state(settings, ranks)
    wake_adapters(state)
    micros = micro_batches(state.config, case.replay)
    share = len(micros) // ranks.data_size
    mine = micros[ranks.data_rank * share : (ranks.data_rank + 1) * share]
    stepper = Stepper(settings, ranks)
    sums = stepper._accumulate(state, mine, counts_of(micros))
    gradients = {name: full(p.grad).numpy() for name, p in state.trained() if p.grad is not None}
    load = None if sums.expert_load_LE is None else sums.expert_load_LE.numpy()
    report = stepper.step(state, RankBatch(1, mine, counts_of(micros)))
    weights = {name: full(p).numpy() for name, p in state.trained()}
    metrics = {name: report.metrics[name] for name in METRICS}
    logprobs = [logprobs_N.numpy() for logprobs_N in report.logprobs]
    every = gradients | {f"updated {name}": weight for name, weight in weights.items()} if ranks.is_main else {}
    return {"arrays": every, "metrics": metrics, "logprobs": logprobs, "load": load, "data_rank": ranks.data_rank}


def wake_adapters(state: TrainState) -> None:
    """Give adapters, which begin at zero, something to say."""
    for name, parameter in state.trained():
        if "lora_B" in name:
            draw = torch.Generator().manual_seed(len(name))
            fill(parameter, torch.randn(parameter.shape, generator=draw) * 0.05)


def micro_batches(config: ModelConfig, replay: bool) -> list[MicroBatch]:
    micros = [rich_micro_batch(n, config.vocab_size, seed=i) for i, n in enumerate(LENGTHS)]
    for micro in micros if replay else ():
        rng = np.random.default_rng(len(micro))
        shape = (len(micro), config.layers, config.experts_per_token)
        chosen = np.argsort(rng.random((*shape[:2], config.experts)), -1)[..., : shape[2]]
        micro.routed_experts = np.where(rng.random(shape[:1])[:, None, None] < 0.7, chosen, -1).astype(np.int16)
    return micros


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints whose heads no even number of ranks divides, and with windows, sinks and a selection bias."""
    register_family(SinkMoe())
    tiny = resolve_model("tiny")
    known = load_config(tiny)
    three = replace(known, heads=3, kv_heads=3)
    windows = SinkMoeConfig(
        "sink_moe", known.vocab_size, 64, layers=3, heads=4, kv_heads=2, head_dim=16, mlp_width=64, rotary_dim=8,
        max_len=256, experts=4, experts_per_token=2, expert_width=24, normalize_gates=True, window=5,
    )  # fmt: skip
    configs = {"three": three, "windows": windows, "wide": replace(windows, window=40, heads=6)}
    configs |= {name: hf_config(file) for name, file in HYBRIDS.items()}
    found = {}
    for name, config in configs.items():
        model = build_model(config)
        with torch.no_grad():
            for parameter, value in model.named_parameters():
                if parameter.endswith("sinks"):
                    value.copy_(torch.linspace(-1, 1, len(value)))
        path = tmp_path_factory.mktemp("models") / name
        save_checkpoint(model, path, files_from=tiny)
        found[name] = str(path)
    return found


def hf_config(file: str) -> ModelConfig:
    path = Path(__file__).parents[1] / "models" / "families" / file
    return config_from_hf(json.loads(path.read_text()))


def cases(folders: dict[str, str]) -> list[Case]:
    outside = {"model__family": FAMILY}
    full, selective = ({"trainer__activations__checkpoint": mode} for mode in ("full", "selective"))
    gspo = {"trainer__loss": {"type": "gspo", "eps_low": 0.5, "eps_high": 0.5}}
    return [
        Case("dense", {"model__path": "tiny"}),
        Case("dense, full", {"model__path": "tiny-llama", **full}),
        Case("moe, selective, replay", {"model__path": "tiny-moe", **selective}, replay=True),
        Case("lora, full", {"model__path": "tiny", "model__lora__rank": 4, **full}),
        Case("gspo", {"model__path": "tiny", **gspo}),
        Case("three heads", {"model__path": folders["three"]}),
        Case("three heads, selective", {"model__path": folders["three"], **selective}),
        Case("windows and sinks", {"model__path": folders["windows"], **outside}),
        Case("windows and sinks, full", {"model__path": folders["windows"], **outside, **full}),
        Case("wide windows, six heads, selective", {"model__path": folders["wide"], **outside, **selective}),
        Case("delta net and attention", {"model__path": folders["qwen3_next"]}),
        Case("mamba and attention, full", {"model__path": folders["nemotron_h"], **full}),
    ]


Work = list[tuple[ParallelDims, Case]]
FOUR = 4
"""Ranks of the group that all quick tests share: to start one takes seconds."""
EXPERTS_AND_CONTEXT = ParallelDims(shard=2, context=2, expert=2)
"""Experts are split over ranks that share a sequence."""


def quick_work(folders: dict[str, str]) -> Work:
    """A case of each way to attend, recur and route, on four ranks."""
    named = {case.name: case for case in cases(folders)}
    windows = named["windows and sinks, full"]
    over_four = [
        named["moe, selective, replay"],
        named["three heads, selective"],
        windows,
        named["delta net and attention"],
        named["mamba and attention, full"],
    ]
    return [(ParallelDims(context=FOUR), case) for case in over_four] + [(EXPERTS_AND_CONTEXT, over_four[0])]


def rest_of_work(folders: dict[str, str], ranks: int) -> Work:
    """All other cases on so many ranks."""
    every = cases(folders)
    work = [(ParallelDims(context=ranks), case) for case in every]
    if ranks == FOUR:
        work += [(ParallelDims(shard=2, context=2), case) for case in every[:2]]
        work += [(ParallelDims(replicate=2, context=2), every[2])]
        work += [(ParallelDims(context=4, expert=4), every[7]), (EXPERTS_AND_CONTEXT, every[8])]
    quick = quick_work(folders)
    return [one for one in work if one not in quick]


def alone(work: Work) -> dict[str, dict[str, Any]]:
    """The outcome of each case on one rank."""
    named = {case.name: case for _, case in work}
    (results,) = run_ranks(1, compute, [(ParallelDims(), case) for case in named.values()])
    return dict(zip(named, results, strict=True))


def assert_work(work: Work, got: list[list[dict[str, Any]]]) -> None:
    want = alone(work)
    for index, (dims, case) in enumerate(work):
        try:
            assert_same(want[case.name], [results[index] for results in got], dims)
        except AssertionError as error:
            raise AssertionError(f"{case.name} with {dims}: {error}") from error


def be_one_of_four(work: Work) -> dict[str, Any]:
    """Everything that quick tests want of a rank."""
    with joined(small_settings(placement__trainer_ranks=FOUR)) as group:
        return {
            "outcomes": [outcome(case, replace(group, dims=dims)) for dims, case in work],
            "recurred": [recur(group, *samples) for samples in RECURRED],
            "sent": [bytes_by_heads(group, recompute) for recompute in RECOMPUTED],
        }


@pytest.fixture(scope="module")
def four(folders: dict[str, str]) -> list[dict[str, Any]]:
    return run_ranks(FOUR, be_one_of_four, quick_work(folders))


def test_ranks_that_share_a_micro_batch_compute_what_one_does(
    folders: dict[str, str], four: list[dict[str, Any]]
) -> None:
    assert_work(quick_work(folders), [rank["outcomes"] for rank in four])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, FOUR])
def test_every_case_is_the_same_on_any_number_of_ranks(ranks: int, folders: dict[str, str]) -> None:
    work = rest_of_work(folders, ranks)
    assert_work(work, run_ranks(ranks, compute, work))


def assert_same(want: dict[str, Any], ranks: list[dict[str, Any]], dims: ParallelDims) -> None:
    arrays = ranks[0]["arrays"]
    assert arrays.keys() == want["arrays"].keys()
    for name, value in want["arrays"].items():
        np.testing.assert_allclose(arrays[name], value, atol=1e-6, rtol=1e-5, err_msg=name)
    by_data_rank = [ranks[rank]["logprobs"] for rank in range(0, len(ranks), dims.context)]
    logprobs = [values for data_rank in by_data_rank for values in data_rank]
    for value, expected in zip(logprobs, want["logprobs"], strict=True):
        np.testing.assert_allclose(value, expected, atol=2e-6)
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(want["metrics"], rel=1e-5, abs=1e-6)
    if want["load"] is not None:
        np.testing.assert_array_equal(sum(rank["load"] for rank in ranks), want["load"])


cuts = st.builds(Cut, st.lists(st.integers(1, 40), min_size=1, max_size=8).map(tuple), st.integers(1, 6), st.booleans())


@given(cuts)
def test_parts_are_equal_and_have_every_row_once(cut: Cut) -> None:
    parts = [cut.rows(part) for part in range(cut.parts)]
    assert {len(rows) for rows in parts} == {cut.size}
    assert sorted(np.concatenate(parts).tolist()) == list(range(cut.parts * cut.size))
    assert cut.padding < cut.parts * (2 if cut.balanced else 1)
    assert sum(cut.padded_lengths) == cut.parts * cut.size
    for part, rows in enumerate(parts):
        where, index = cut.find(rows)
        assert (where == part).all()
        assert index.tolist() == list(range(cut.size))
        assert (
            cut.padding_of(part)
            == (rows >= cut.tokens).sum()
            == (rows[-cut.padding_of(part) or cut.size :] >= cut.tokens).sum()
        )


@given(cuts, st.one_of(st.none(), st.integers(1, 12)))
def test_a_part_fetches_the_keys_that_its_queries_see_and_no_others(cut: Cut, window: int | None) -> None:
    starts = np.repeat(np.cumsum([0, *cut.padded_lengths[:-1]]), cut.padded_lengths)
    for part in range(cut.parts):
        seen: set[int] = set()
        for row in cut.rows(part).tolist():
            first = int(starts[row]) if window is None else max(int(starts[row]), row - window + 1)
            seen |= set(range(first, row + 1))
        keys = cut.keys(part, window)
        assert keys.tolist() == sorted(seen)
        pieces = cut.pieces(part)
        assert [row for piece in pieces for row in range(piece.first, piece.end)] == cut.rows(part).tolist()
        for piece in pieces:
            at = int(np.searchsorted(keys, first_key(piece, window)))
            size = piece.end - first_key(piece, window)
            assert keys[at : at + size].tolist() == list(range(first_key(piece, window), piece.end))


@given(st.integers(1, 6), st.integers(1, 200))
def test_balanced_parts_of_one_sample_have_the_same_work(parts: int, size: int) -> None:
    """In pairs of a query and a key that it sees."""
    cut = Cut((2 * parts * size,), parts, balanced=True)
    assert len({int((cut.rows(part) + 1).sum()) for part in range(parts)}) == 1


def decaying_sum(weight: torch.Tensor) -> Recurrence:
    """s_t = sigmoid(g_t) · s_(t-1) + x_t, of which the output is a multiple."""

    def run(
        inputs: Sequence[torch.Tensor], lengths: Sequence[int], states: States | None
    ) -> tuple[torch.Tensor, States]:
        outputs, last = [], []
        for number, (x, gate) in enumerate(zip(*(torch.split(i, list(lengths)) for i in inputs), strict=True)):
            state = torch.zeros(x.shape[1]) if states is None else states[0][number]
            for value, decay in zip(x, gate.sigmoid(), strict=True):
                state = decay * state + value
                outputs.append(state * weight)
            last.append(state)
        return torch.stack(outputs), (torch.stack(last),)

    return run


RECURRED = [([3, 14, 1, 2], True), ([17], False)]
"""Lengths of samples, and whether inputs want gradients."""


def recur(ranks: Ranks, lengths: list[int], trained_inputs: bool) -> dict[str, np.ndarray]:
    """Outputs and gradients of this rank's part of a recurrence, back in the places of all tokens."""
    draw = torch.Generator().manual_seed(sum(lengths))
    whole = [torch.randn(sum(lengths), 3, generator=draw) for _ in range(3)]
    context = ContextGroup.join(replace(ranks, dims=ParallelDims(context=ranks.size)))
    share = None if context is None else ContextShare(Cut(tuple(lengths), ranks.size), context, ranks.device)
    rows = np.arange(sum(lengths)) if share is None else share.rows[share.rows < sum(lengths)]
    parts = whole if share is None else [torch.from_numpy(share.take(x.numpy())) for x in whole]
    plan = PackedPlan(lengths) if share is None else share.plan
    x, gate = (part.requires_grad_(trained_inputs) for part in parts[:2])
    weight = torch.ones(3, requires_grad=True)
    out = plan.recur(0, decaying_sum(weight), [x, gate])
    (out[: len(rows)] * parts[2][: len(rows)]).sum().backward()
    found = {"weight": weight.grad.numpy()} if weight.grad is not None else {}
    named = {"out": out.detach(), "x": x.grad, "gate": gate.grad}
    for name, tensor in named.items():
        if tensor is not None:
            found[name] = np.zeros((sum(lengths), 3), np.float32)
            found[name][rows] = tensor[: len(rows)].numpy()
    return found


@pytest.mark.parametrize("number", range(len(RECURRED)))
def test_recurrent_states_go_from_rank_to_rank_and_their_gradients_back(
    number: int, four: list[dict[str, Any]]
) -> None:
    with joined(small_settings()) as ranks:
        want = recur(ranks, *RECURRED[number])
    got = [rank["recurred"][number] for rank in four]
    assert want.keys() == got[0].keys()
    for name, value in want.items():
        np.testing.assert_allclose(sum(part[name] for part in got), value, atol=1e-6, err_msg=name)


RECOMPUTED: list[Recompute] = ["off", "selective"]


def bytes_by_heads(group: Ranks, recompute: Recompute) -> int:
    """Bytes of the all-to-alls of one micro-batch on this rank, its own part included."""
    settings = small_settings(model__path="tiny", trainer__activations__checkpoint=recompute)
    counted = 0
    exchange = dist.all_to_all_single

    def counting(out: torch.Tensor, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        nonlocal counted
        counted += x.nbytes
        return exchange(out, x, *args, **options)

    ranks = replace(group, dims=ParallelDims(context=group.size))
    state = build_state(settings, ranks)
    micro = rich_micro_batch([40, 24], state.config.vocab_size, seed=0)
    with patch.object(dist, "all_to_all_single", counting):
        Stepper(settings, ranks)._accumulate(state, [micro], counts_of([micro]))
    return counted


@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_what_is_sent_by_heads_is_what_a_dry_run_says(recompute: Recompute, four: list[dict[str, Any]]) -> None:
    """At four ranks the two key heads are repeated."""
    config = load_config(resolve_model("tiny"))
    layout = Layout(config, ParallelDims(context=FOUR), number_bytes=4, recompute=recompute)
    (heads,) = (one for one in layout.traffic(64) if one.dimension == "context")
    assert [rank["sent"][RECOMPUTED.index(recompute)] for rank in four] == [heads.payload] * FOUR
