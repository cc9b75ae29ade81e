"""NCCL between processes on one GPU: each says that it is a host of its own, and then sockets connect them."""

import faulthandler
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from headway.config.shared import PointToPointWeights
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.announcements import latest
from headway.transport.weights import make_receiver, make_sender, point_to_point, process_pairs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and torch.distributed.is_nccl_available()), reason="needs a CUDA device and NCCL"
    ),
]

SECONDS = 100
HASTE = timedelta(seconds=8)
SOCKETS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
}
STEPS = 3
SETTINGS = {
    "model": {"path": "tiny", "dtype": "float32"},
    "seq_len": 64,
    "weights": {"type": "point_to_point"},
    "trainer": {"optim": {"type": "sgd", "lr": 0.05}},
}
LENGTHS = [[9, 17, 4], [24, 5], [30], [3, 3, 12, 8]]


def _be(host: str, pipe: Connection, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ |= SOCKETS | {"NCCL_HOSTID": host}
    # A rank that waits forever for another one says where.
    faulthandler.dump_traceback_later(SECONDS - 10, exit=True)
    work(pipe, *args)


@contextmanager
def _started(host: str, work: Callable[..., None], *args: Any) -> Iterator[Connection]:
    """A process that NCCL takes for a host of its own. It is killed in the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_be, args=(host, theirs, work, args))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _next(pipe: Connection) -> Any:
    assert pipe.poll(SECONDS), "the other process did not answer"
    return pipe.recv()


def _weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "first": torch.randn(64, 3, generator=generator).half(),
        "more.than.a.chunk": torch.randn(5000, 5001, generator=generator).bfloat16(),
        "norm": torch.randn(77, generator=generator),
        "strided": torch.randn(33, 65, generator=generator).t(),
        "empty": torch.empty(0, 4),
    }


def _publish(pipe: Connection, root: str) -> None:
    sender = make_sender(PointToPointWeights(), RunPaths(Path(root)))
    while (version := pipe.recv()) is not None:
        on_gpu = {name: tensor.cuda() for name, tensor in _weights(version).items()}
        pipe.send(msgspec.json.encode(sender.publish(version, on_gpu.items())))


def _fetch(pipe: Connection, places: dict[str, Tensor]) -> None:
    """An engine: what an update brought, and the backends that it came by."""
    used, paired = set(), point_to_point.process_pair

    def noted(*args: Any) -> Any:
        used.add(args[-1])
        return paired(*args)

    point_to_point.process_pair = noted
    places = {name: tensor.cuda() for name, tensor in places.items()}
    receiver = make_receiver("cuda")
    while (body := pipe.recv()) is not None:
        got = dict(receiver.receive(msgspec.json.decode(body, type=WeightUpdate), places))
        assert all(tensor.is_cuda for tensor in got.values())
        pipe.send(({name: _array(tensor) for name, tensor in got.items()}, used))


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().float().numpy()


def test_weights_go_from_gpu_to_gpu_by_nccl(tmp_path: Path) -> None:
    places = {name: torch.zeros_like(tensor) for name, tensor in _weights(0).items() if name != "norm"}
    with _started("trainer", _publish, str(tmp_path)) as trainer, _started("engine", _fetch, places) as engine:
        for version in range(3):
            trainer.send(version)
            engine.send(_next(trainer))
            got, used = _next(engine)
            assert used == {"nccl"}
            want = _weights(version)
            assert got.keys() == want.keys()
            for name, tensor in want.items():
                np.testing.assert_array_equal(got[name], _array(tensor), err_msg=name)


def _train(pipe: Connection, root: str, rank: int, ranks: int, port: int) -> None:
    """A few steps, of which losses and weights are told, and their version is published until the pipe says so."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # What only ranks need, since every process here pays for the imports above.
    from headway.config.trainer import TrainSettings
    from headway.core.batches import ComponentCounts
    from headway.trainer.feed import fake_micro_batch
    from headway.trainer.parallel.ranks import joined
    from headway.trainer.parallel.sharding import full
    from headway.trainer.publisher import Publisher
    from headway.trainer.state import build_state
    from headway.trainer.step import Stepper
    from headway.transport.rollouts import RankBatch

    placement = {"device": "cuda", "trainer_ranks": ranks}
    settings, paths = TrainSettings.model_validate(SETTINGS | {"placement": placement}), RunPaths(Path(root))
    with joined(settings) as group:
        publisher, state = Publisher(settings, paths), build_state(settings, group)
        stepper, losses = Stepper(settings, group), []
        for step in range(1, STEPS + 1):
            draw = np.random.default_rng(step)
            micros = [fake_micro_batch(lengths, state.config.vocab_size, draw) for lengths in LENGTHS]
            sampled = sum(int(np.count_nonzero(micro.rl_weight)) for micro in micros)
            mine = micros[rank * len(micros) // ranks : (rank + 1) * len(micros) // ranks]
            report = stepper.step(state, RankBatch(step, mine, ComponentCounts(sampled, 0, 0)))
            losses.append(report.metrics["loss"])
        publisher.publish(state)
        update = latest(paths)
        assert update is not None
        weights = {name: _array(full(parameter)) for name, parameter in state.trained()}
        pipe.send((losses, weights, msgspec.json.encode(update)))
        pipe.recv()


def _publish_in_haste(pipe: Connection, root: str) -> None:
    process_pairs.TIMEOUT = HASTE
    _publish(pipe, root)


def _die(pipe: Connection) -> None:
    """An engine that ends in the middle of an update, of which it has seen the first chunk."""
    next(make_receiver("cuda").receive(msgspec.json.decode(pipe.recv(), type=WeightUpdate)))
    os._exit(1)


def test_an_engine_that_dies_is_not_missed(tmp_path: Path) -> None:
    """Neither then nor when the trainer has waited for it long enough."""
    trainers, engines = _started("trainer", _publish_in_haste, str(tmp_path)), _started("engine", _fetch, {})
    with trainers as trainer, engines as engine, _started("mortal", _die) as mortal:
        trainer.send(1)
        update = _next(trainer)
        mortal.send(update)
        with pytest.raises(EOFError):
            _next(mortal)
        engine.send(update)
        got, used = _next(engine)
        assert used == {"nccl"}
        np.testing.assert_array_equal(got["norm"], _array(_weights(1)["norm"]))
        time.sleep(HASTE.seconds + 2)
        trainer.send(2)
        engine.send(_next(trainer))
        np.testing.assert_array_equal(_next(engine)[0]["norm"], _array(_weights(2)["norm"]))


def _trained(root: Path, ranks: int) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Losses, weights in the end, and what an engine then got, by NCCL from every rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        group = [
            stack.enter_context(_started(f"rank{rank}", _train, str(root), rank, ranks, port)) for rank in range(ranks)
        ]
        engine = stack.enter_context(_started("engine", _fetch, {}))
        told = [_next(rank) for rank in group]
        assert all(losses == told[0][0] for losses, _, _ in told)
        engine.send(told[0][2])
        got, used = _next(engine)
        assert used == {"nccl"}
        return told[0][0], told[0][1], got


def test_two_ranks_train_as_one_and_both_send(tmp_path: Path) -> None:
    """FSDP2 over NCCL, and from each rank to an engine: three processes."""
    one, two = (_trained(tmp_path / f"{ranks}", ranks) for ranks in (1, 2))
    np.testing.assert_allclose(two[0], one[0], rtol=1e-4, atol=1e-6)
    assert one[0][0] != one[0][-1]
    for of_one, of_two in zip(one[1:], two[1:], strict=True):
        assert of_one.keys() == of_two.keys()
        for name, weight in of_one.items():
            np.testing.assert_allclose(of_two[name], weight, atol=1e-6, err_msg=name)
