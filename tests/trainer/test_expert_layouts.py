"""Experts split over four ranks: training goes on under another layout, weights leave from where they lie, and what
ranks send is what the layout says."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_helpers import LiveMemory, rich_batch, run_paths, run_ranks, small_settings

from headway.base.errors import UsageError
from headway.config.trainer import TrainSettings
from headway.models.checkpoints.folders import load_model, read_tensors
from headway.models.configs.config import ModelConfig
from headway.models.registry import load_config
from headway.models.tiny import resolve_model
from headway.trainer.checkpoints.checkpoints import Checkpoints
from headway.trainer.exports import export_to
from headway.trainer.optimizers import muon
from headway.trainer.parallel.dims import ParallelDims
from headway.trainer.parallel.layout import FLOAT32, Layout
from headway.trainer.parallel.ranks import Ranks, joined
from headway.trainer.parallel.sharding import full
from headway.trainer.publisher import Publisher
from headway.trainer.state import TrainState, build_state
from headway.trainer.step import Stepper
from headway.transport.announcements import latest
from headway.transport.rollouts import RankBatch

STRETCHES = [((2, 1, 1), 5), ((2, 1, 4), 8)]
"""Expert ranks, copies and context ranks, and the step that they train to."""
MORE_STRETCHES = [((2, 1, 1), 8), ((2, 1, 4), 10), ((4, 1, 1), 14), ((1, 2, 1), 18), ((2, 2, 1), 20)]
RANKS = 4


def settings_for(layout: tuple[int, ...], ranks: int = RANKS, **changes: Any) -> TrainSettings:
    return small_settings(
        **{
            "model__path": "tiny-moe",
            "placement__trainer_ranks": ranks,
            "trainer__parallel": dict(zip(("expert", "replicate", "context"), layout, strict=False)),
            "trainer__optim": {"type": "sgd", "lr": 0.05, "momentum": 0.9},
            **changes,
        }
    )


def train_to(state: TrainState, settings: TrainSettings, ranks: Ranks, last: int) -> None:
    stepper = Stepper(settings, ranks)
    for step in range(state.step + 1, last + 1):
        batch = rich_batch(step, ranks.data_size, state.config.vocab_size)
        stepper.step(state, RankBatch(step, batch.ranks[ranks.data_rank], batch.counts))


def everything(state: TrainState) -> dict[str, np.ndarray]:
    """Weights and optimizer, whole."""
    tensors = dict(state.trained()) | {f"optimizer.{name}": t for name, t in state.optimizer.state_tensors().items()}
    return {name: full(tensor).numpy().copy() for name, tensor in tensors.items()}


def move_about(
    group: Ranks, folder: Path, stretches: Sequence[tuple[tuple[int, ...], int]] = STRETCHES
) -> dict[str, np.ndarray]:
    """Train stretch after stretch, each from the checkpoint of the one before it."""
    for layout, last in stretches:
        settings = settings_for(layout)
        ranks = replace(group, dims=ParallelDims.from_settings(settings))
        state = build_state(settings, ranks)
        checkpoints = Checkpoints(settings, run_paths(folder), ranks)
        assert checkpoints.restore(state) == (last > stretches[0][1])
        train_to(state, settings, ranks, last)
        checkpoints.save(state)
        checkpoints.wait()
        checkpoints.close()
        ranks.barrier()
    return everything(state)


def publish(group: Ranks, folder: Path) -> list[str]:
    """Publish from two layouts, without a whole tensor on any rank, and export."""
    found = []
    for layout in ((2, 1), (2, 2)):
        settings = settings_for(layout)
        ranks = replace(group, dims=ParallelDims.from_settings(settings))
        paths, state = run_paths(folder / f"{layout}"), build_state(settings, ranks)
        publisher = Publisher(settings, paths)
        with patch.object(DTensor, "full_tensor", side_effect=AssertionError("a whole tensor was gathered")):
            publisher.publish(state)
        publisher.close()
        update = latest(paths)
        assert update is not None
        found.append(update.fingerprint)
    export_to(state, folder / "export", ranks)
    return found


def train_adapter(group: Ranks) -> dict[str, np.ndarray]:
    """Two steps of an adapter on attention, beside split experts."""
    layout = (min(2, group.size), 1)
    settings = settings_for(layout, group.size, model__lora={"rank": 4}, trainer__activations__checkpoint="selective")
    ranks = replace(group, dims=ParallelDims.from_settings(settings))
    state = build_state(settings, ranks)
    train_to(state, settings, ranks, 2)
    return {name: full(tensor).numpy().copy() for name, tensor in state.trained()}


class Collectives(TorchDispatchMode):
    """Counts the bytes of collectives: what a rank has of the whole, by operation and the ranks that take part."""

    NAMES = {
        "_allgather_base_": "all-gather",
        "_reduce_scatter_base_": "reduce-scatter",
        "alltoall_base_": "all-to-all",
    }

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if name in self.NAMES:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            whole = tensors[1] if name == "alltoall_base_" else max(tensors, key=lambda t: t.numel())
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            self.bytes[self.NAMES[name], ranks] += whole.numel() * whole.element_size()
            self.calls[self.NAMES[name]] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Counts:
    """Of one micro-batch: bytes of collectives, all-to-alls, evaluations of routers, and its tokens."""

    bytes: Counter[Any]
    exchanges: int
    routings: int
    tokens: int


def count_work(group: Ranks, layout: tuple[int, int]) -> dict[str, Counts]:
    """By what is recomputed."""
    found = {}
    for recompute in ("off", "selective", "full"):
        settings = settings_for(layout, group.size, trainer__activations__checkpoint=recompute)
        ranks = replace(group, dims=ParallelDims.from_settings(settings))
        state = build_state(settings, ranks)
        batch = rich_batch(1, group.size, state.config.vocab_size)
        micros = batch.ranks[ranks.data_rank][:1]
        stepper = Stepper(settings, ranks)
        router_shape = (state.config.experts, state.config.width)
        with Collectives() as collectives, patch.object(F, "linear", wraps=F.linear) as linear:
            stepper._accumulate(state, micros, batch.counts)
        routings = sum(call.args[1].shape == router_shape for call in linear.call_args_list)
        exchanges = collectives.calls["all-to-all"]
        found[recompute] = Counts(collectives.bytes, exchanges, routings, sum(micros[0].lengths))
    return found


def peaks(group: Ranks, folder: Path) -> dict[str, int]:
    """Bytes of tensors that each act makes at once, at most, on this rank."""
    settings = settings_for((2, 1), trainer__probe=False)  # a probe is a forward pass
    ranks = replace(group, dims=ParallelDims.from_settings(settings))
    build_state(settings, ranks)  # the first one also tunes products of matrices
    with LiveMemory() as load:
        state = build_state(settings, ranks)
    publisher, checkpoints = Publisher(settings, run_paths(folder)), Checkpoints(settings, run_paths(folder), ranks)
    with LiveMemory() as publish:
        publisher.publish(state)
    with LiveMemory() as save:
        checkpoints.save(state)
        checkpoints.wait()
    with LiveMemory() as restore:
        assert checkpoints.restore(state)
    publisher.close()
    checkpoints.close()
    return {"load": load.peak, "publish": publish.peak, "save": save.peak, "restore": restore.peak}


def hold_experts(group: Ranks) -> int:
    """Experts that this rank orthogonalizes at a time, at most."""
    sizes: list[int] = []

    def watched(matrix: torch.Tensor) -> torch.Tensor:
        sizes.append(len(matrix) if matrix.ndim == 3 else 0)
        return original(matrix)

    original = muon.orthogonalize
    settings = settings_for((2, 1), trainer__optim={"type": "muon"})
    ranks = replace(group, dims=ParallelDims.from_settings(settings))
    state = build_state(settings, ranks)
    with patch.object(muon, "orthogonalize", watched):
        train_to(state, settings, ranks, 1)
    return max(sizes)


def work(folder: Path) -> dict[str, Any]:
    with joined(settings_for((2, 1))) as group:
        return {
            "moved": move_about(group, folder / "moved"),
            "published": publish(group, folder / "published"),
            "adapter": train_adapter(group),
            "work": count_work(group, (2, 1)),
            "orthogonalized": hold_experts(group),
            "peaks": peaks(group, folder / "peaks"),
            "refused": refused(group),
        }


def refused(group: Ranks) -> list[str]:
    """Settings that no layout can satisfy."""
    messages = []
    for changes in ({"model__path": "tiny"}, {"trainer__experts__balance": "bias"}):
        settings = settings_for((2, 1), **changes)
        with pytest.raises(UsageError) as error:
            build_state(settings, replace(group, dims=ParallelDims.from_settings(settings)))
        messages.append(str(error.value))
    return messages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict[str, Any]]:
    """Of four ranks, which do all in one group: to start one takes seconds."""
    return run_ranks(RANKS, work, folder)


def assert_near(got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, atol=tolerance, rtol=0, err_msg=name)


def steps_alone(last: int) -> dict[str, np.ndarray]:
    """Weights and optimizer of one rank."""
    settings = settings_for((1, 1), 1)
    with joined(settings) as ranks:
        state = build_state(settings, ranks)
        train_to(state, settings, ranks, last)
        return everything(state)


def test_eight_steps_are_five_and_three_under_another_layout(results: list[dict[str, Any]]) -> None:
    assert_near(results[0]["moved"], steps_alone(8), 2e-5)


def move_more(folder: Path) -> dict[str, np.ndarray]:
    with joined(settings_for((2, 1))) as group:
        return move_about(group, folder, MORE_STRETCHES)


@pytest.mark.slow
def test_twenty_steps_are_the_same_over_changing_layouts(tmp_path: Path) -> None:
    assert_near(run_ranks(RANKS, move_more, tmp_path)[0], steps_alone(20), 2e-5)


def test_every_layout_publishes_and_exports_the_same_weights(folder: Path, results: list[dict[str, Any]]) -> None:
    settings = settings_for((1, 1), 1)
    with joined(settings) as ranks:
        publisher = Publisher(settings, run_paths(folder / "alone"))
        publisher.publish(build_state(settings, ranks))
        publisher.close()
    update = latest(run_paths(folder / "alone"))
    assert update is not None
    for result in results:
        assert result["published"] == [update.fingerprint] * 2
    want, got = dict(read_tensors(resolve_model("tiny-moe"))), dict(read_tensors(folder / "published" / "export"))
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    load_model(folder / "published" / "export")


def test_adapters_train_beside_split_experts(results: list[dict[str, Any]]) -> None:
    with joined(settings_for((1, 1), 1)) as ranks:
        assert_near(results[0]["adapter"], train_adapter(ranks), 1e-6)


def test_no_rank_holds_the_whole_model_at_any_time(results: list[dict[str, Any]]) -> None:
    """Each of four ranks makes little more than its share: of weights and momentum, and to publish of weights alone."""
    share = FLOAT32 * Layout(tiny_moe(), ParallelDims(shard=4, expert=2)).weights_held
    for result in results:
        at_most = {"load": 2.25 * share, "publish": 1.25 * share, "save": 2.25 * share, "restore": 2.25 * share}
        assert {name: peak for name, peak in result["peaks"].items() if peak > at_most[name]} == {}
        assert result["peaks"]["load"] > 1.9 * share  # all of it was counted


def test_no_rank_orthogonalizes_experts_of_others(results: list[dict[str, Any]]) -> None:
    assert [result["orthogonalized"] for result in results] == [2] * RANKS  # 8 experts over 2 x 2 ranks


def tiny_moe() -> ModelConfig:
    return load_config(resolve_model("tiny-moe"))


def test_ranks_send_what_the_layout_says_and_no_experts_to_expert_ranks(results: list[dict[str, Any]]) -> None:
    for recompute in ("off", "selective", "full"):
        layout = Layout(tiny_moe(), ParallelDims(shard=4, expert=2), number_bytes=4, recompute=recompute)
        exchanged: Counter[tuple[int, ...]] = Counter()
        for rank, result in enumerate(results):
            expert, expert_shard = tuple(range(rank - rank % 2, rank - rank % 2 + 2)), (rank % 2, rank % 2 + 2)
            found, tokens = result["work"][recompute].bytes, result["work"][recompute].tokens
            said = {(t.dimension, t.operation): t.payload for t in layout.traffic(tokens) if t.what != "counts"}
            counts = sum(t.payload for t in layout.traffic(tokens) if t.what == "counts")
            for operation in ("all-gather", "reduce-scatter"):
                assert found[operation, expert_shard] == said["expert_shard", operation], (rank, operation)
                assert (operation, expert) not in found
            # Rows return where they came from, so that two ranks together send what their tokens need.
            exchanged[expert] += found["all-to-all", expert] - counts - said["expert", "all-to-all"]
        assert set(exchanged.values()) == {0}, recompute


def test_selective_recomputation_neither_routes_nor_exchanges_again(results: list[dict[str, Any]]) -> None:
    layers = tiny_moe().layers
    for result in results:
        kept, selective, full = (result["work"][mode] for mode in ("off", "selective", "full"))
        # Counts, rows, gates and results go out; gradients of all but the counts come back.
        assert kept.exchanges == selective.exchanges == 7 * layers
        assert full.exchanges == 11 * layers
        assert (kept.routings, selective.routings, full.routings) == (layers, layers, 2 * layers)


def test_what_cannot_be_split_is_refused(results: list[dict[str, Any]]) -> None:
    dense, unbiased = results[0]["refused"]
    assert dense == "trainer.parallel.expert is 2, but the model has no experts; set it to 1"
    assert "routers have no selection bias" in unbiased
