"""Several ranks publish together: each sends its own rows, and the engine can't tell."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from headway.base.errors import HeadwayError
from headway.config.shared import FilesystemWeights, PointToPointWeights, SharedMemoryWeights
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.announcements import latest
from headway.transport.weights import make_receiver, make_sender
from headway.transport.weights.fingerprint import fingerprint_of
from headway.transport.weights.shards import ParameterPart, local_shards, split_parameter
from headway.transport.weights.shards import Shard as WeightShard

SETTINGS = {
    "filesystem": FilesystemWeights(),
    "shared_memory": SharedMemoryWeights(),
    "point_to_point": PointToPointWeights(),
}


def _whole(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "uneven": torch.randn(7, 3, generator=generator),
        "fewer.rows.than.ranks": torch.randn(2, 5, generator=generator).bfloat16(),
        "bias": torch.randn(9, generator=generator).bfloat16(),
        "replicated": torch.randn(4, 4, generator=generator),
        "plain.0": torch.randn(30, generator=generator),
        "plain.1": torch.randn(31, generator=generator).half(),
        "hybrid": torch.randn(8, 2, generator=generator),
        "one.mesh.per.replica": torch.randn(6, 2, generator=generator),
    }


EXPERTS, WIDTH = 5, 3
PARTS = [
    ParameterPart(f"experts.{expert}.{kind}", (expert, slice(kind * WIDTH, (kind + 1) * WIDTH)))
    for expert in range(EXPERTS)
    for kind in range(2)
]
TURNED = [ParameterPart("turned", (), True), *(ParameterPart(f"turned.{e}", (e,), True) for e in range(EXPERTS))]
FUSED = [
    ParameterPart("fused.low", (slice(0, 4),)),
    ParameterPart("fused.high", (slice(4, 9),)),
    ParameterPart("fused.left", (slice(2, 9), slice(0, 2))),
]


def _stacked(version: int) -> tuple[Tensor, Tensor]:
    """Parameters that are spread over several tensors: stacked experts, and matrices on top of each other."""
    generator = torch.Generator().manual_seed(100 + version)
    experts = torch.randn(EXPERTS, 2 * WIDTH, 4, generator=generator)
    return experts.bfloat16(), torch.randn(9, 5, generator=generator)


def _expected(version: int) -> dict[str, Tensor]:
    experts, fused = _stacked(version)
    cut = {part.name: experts[part.at] for part in PARTS} | {part.name: fused[part.at] for part in FUSED}
    turned = experts.transpose(1, 2).contiguous()
    return _whole(version) | cut | {"turned": turned} | {f"turned.{e}": turned[e] for e in range(EXPERTS)}


def _outgoing(version: int, ranks: int) -> Iterator[tuple[str, Tensor | WeightShard]]:
    yield from _laid_out(version, ranks).items()
    line = init_device_mesh("cpu", (ranks,))
    grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    experts, fused = _stacked(version)
    yield from split_parameter(distribute_tensor(experts, line, [Shard(0)]), PARTS + TURNED)
    yield from split_parameter(distribute_tensor(fused, grid, [Replicate(), Shard(0)]), FUSED)


def _laid_out(version: int, ranks: int) -> dict[str, Tensor]:
    line = init_device_mesh("cpu", (ranks,))
    grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    whole = _whole(version)
    for name in ("uneven", "fewer.rows.than.ranks", "bias"):
        whole[name] = distribute_tensor(whole[name], line, [Shard(0)])
    whole["replicated"] = distribute_tensor(whole["replicated"], line, [Replicate()])
    whole["hybrid"] = distribute_tensor(whole["hybrid"], grid, [Replicate(), Shard(0)])
    whole["one.mesh.per.replica"] = distribute_tensor(whole["one.mesh.per.replica"], grid["shard"], [Shard(0)])
    return whole


def _rank(rank: int, ranks: int, root: str, kinds: list[str], fetched: Event) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=ranks)
    senders = {kind: make_sender(SETTINGS[kind], RunPaths(Path(root) / kind)) for kind in kinds}
    for version in (1, 2):
        for sender in senders.values():
            sender.publish(version, _outgoing(version, ranks))
    (Path(root) / f"ready_{rank}").touch()
    fetched.wait(200)
    for sender in senders.values():
        sender.close()
    dist.destroy_process_group()


def _check(update: WeightUpdate | None) -> None:
    assert update is not None
    assert update.version == 2
    received = dict(make_receiver().receive(update))
    expected = _expected(2)
    assert update.fingerprint == fingerprint_of(expected.items()).hexdigest()
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_publish_their_rows_over_every_transport(tmp_path: Path, ranks: int) -> None:
    context = multiprocessing.get_context("forkserver")
    fetched = context.Event()
    group = [
        context.Process(target=_rank, args=(rank, ranks, str(tmp_path), list(SETTINGS), fetched))
        for rank in range(ranks)
    ]
    for process in group:
        process.start()
    try:
        while not all((tmp_path / f"ready_{rank}").exists() for rank in range(ranks)):
            for process in group:
                process.join(0.1)
                assert process.exitcode is None, "a rank failed before it published"
        for kind in SETTINGS:
            _check(latest(RunPaths(tmp_path / kind)))
        files = sorted(path.name for path in RunPaths(tmp_path / "filesystem").version(2).glob("rank_*"))
        assert len(files) == ranks, "every rank writes its own part"
    finally:
        fetched.set()
        for process in group:
            process.join(60)
    assert [process.exitcode for process in group] == [0] * ranks
    for kind in SETTINGS:
        update = latest(RunPaths(tmp_path / kind))
        assert update is not None
        assert update.transport["type"] == "filesystem", "the last version is kept on disk when the trainer leaves"
        _check(update)


def test_columns_cannot_be_sent() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        split = distribute_tensor(torch.ones(2, 2), mesh, [Shard(1)])
        with pytest.raises(HeadwayError, match="sharded over its rows"):
            list(local_shards([("w", split)], 0, 1))
    finally:
        dist.destroy_process_group()
