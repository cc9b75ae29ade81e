"""Weights within one GPU: handles that another process opens, the host's memory for engines elsewhere, takeover."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.config.shared import FilesystemWeights, PointToPointWeights, SharedMemoryWeights, WeightTransport
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.models.build import build_model
from headway.models.checkpoints.tensors import hf_tensors, load_hf_tensors
from headway.models.configs.config import ModelConfig
from headway.models.serving import StandbyWeights, fuse_projections
from headway.transport.weights import make_receiver, make_sender
from headway.transport.weights.fingerprint import fingerprint_of
from headway.transport.weights.process_pairs import gpu_name, pair_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "big": torch.randn(3000, 1001, generator=generator).bfloat16(),
        "odd": torch.randn(77, generator=generator).half(),
        "strided": torch.randn(33, 65, generator=generator).t(),
        "empty": torch.empty(0, 4),
        "grows": torch.randn(1000 * (seed + 1), generator=generator),
    }


def _on_gpu(seed: int) -> dict[str, Tensor]:
    return {name: tensor.cuda() for name, tensor in _weights(seed).items()}


def _train(pipe: Connection, root: str) -> None:
    sender = make_sender(SharedMemoryWeights(), RunPaths(Path(root)))
    while (version := pipe.recv()) is not None:
        pipe.send(msgspec.json.encode(sender.publish(version, _on_gpu(version).items())))
    sender.close()


@contextmanager
def _trainer(root: Path) -> Iterator[Callable[[int], WeightUpdate]]:
    """A process that publishes versions on request, and is killed in the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_train, args=(theirs, str(root)))
    process.start()

    def publish(version: int) -> WeightUpdate:
        ours.send(version)
        return msgspec.json.decode(ours.recv(), type=WeightUpdate)

    yield publish
    process.kill()
    process.join()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_another_process_gets_what_a_trainer_published_on_its_gpu(tmp_path: Path, device: str) -> None:
    """Also what a second trainer publishes after the first was killed; an engine that comes after both gets nothing."""
    receiver = make_receiver(device)
    places = {name: torch.zeros_like(tensor, device=device).contiguous() for name, tensor in _weights(0).items()}
    for _ in range(2):
        with _trainer(tmp_path / "run") as publish:
            for version in range(4):
                update = publish(version)
                assert update.fingerprint == fingerprint_of(_weights(version).items()).hexdigest()
                received = dict(receiver.receive(update, places))
                assert all(torch.equal(received[name].cpu(), tensor) for name, tensor in _weights(version).items())
                assert received["big"].data_ptr() == places["big"].data_ptr()
    receiver.close()
    with pytest.raises(HeadwayError, match="a trainer that has ended"):
        list(make_receiver("cuda").receive(update))


@pytest.mark.parametrize(
    "settings", [FilesystemWeights(), SharedMemoryWeights(), PointToPointWeights()], ids=lambda settings: settings.type
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_transport_takes_weights_from_a_gpu(settings: WeightTransport, device: str, tmp_path: Path) -> None:
    sender, receiver = make_sender(settings, RunPaths(tmp_path / "run")), make_receiver(device)
    for version in range(3):
        update = sender.publish(version, _on_gpu(version).items())
        received = {name: tensor.cpu() for name, tensor in receiver.receive(update)}
        assert all(torch.equal(received[name], tensor) for name, tensor in _weights(version).items())
    receiver.close()
    sender.close()


def test_nccl_is_for_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes for two: one that two processes place on different hosts counts."""
    own = gpu_name(torch.device("cuda"))
    assert pair_backend(own, own) == pair_backend(own, "") == "gloo"
    monkeypatch.setenv("NCCL_HOSTID", "another")
    assert pair_backend(own, gpu_name(torch.device("cuda"))) == "nccl"


def test_weights_keep_their_addresses_when_new_ones_take_over() -> None:
    config = ModelConfig("qwen3", 97, 32, 2, 4, 2, 8, 48, tied=True, max_len=256)
    live = build_model(config, device="cuda", dtype=torch.bfloat16, seed=1)
    fuse_projections(live)
    standby, places = StandbyWeights(live), [parameter.data_ptr() for parameter in live.parameters()]
    for seed in (2, 3):
        new = build_model(config, device="cuda", dtype=torch.bfloat16, seed=seed)
        load_hf_tensors(standby.model, hf_tensors(new), standby.targets)
        standby.activate()
        assert [parameter.data_ptr() for parameter in live.parameters()] == places
        assert fingerprint_of(hf_tensors(live)).hexdigest() == fingerprint_of(hf_tensors(new)).hexdigest()
