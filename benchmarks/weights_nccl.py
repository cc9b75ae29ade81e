"""Weights from a trainer's process to an engine's by the point_to_point transport, both on one GPU.

    python benchmarks/weights_nccl.py

NCCL connects two GPUs. With one, each process says that it is a host of its own, and then NCCL sends through the
sockets of the loopback interface, as gloo does: this shows that it works and what a version costs beside the wire, and
says nothing of NVLink or InfiniBand.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from headway.config.shared import PointToPointWeights
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.weights import make_receiver, make_sender
from weights import RESULTS, WARM_UP, tensors_of

SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
HOSTS = {"nccl": ("trainer", "engine"), "gloo": ("both", "both")}
"""Of the trainer and the engine. On one host NCCL refuses, and gloo is chosen."""
DEADLINE = 120


def measure(backend: str, megabytes: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        trainer, engine = (
            _start(work, host, (megabytes, folder)) for work, host in zip((_train, _serve), HOSTS[backend], strict=True)
        )
        publish, receive = [], []
        for version in range(1, rounds + WARM_UP + 1):
            seconds, update = _ask(trainer, version)
            publish.append(seconds)
            receive.append(_ask(engine, update))
        for process, _ in (trainer, engine):
            process.kill()
            process.join()
    return {
        "publish_s": statistics.median(publish[WARM_UP:]),
        "receive_s": statistics.median(receive[WARM_UP:]),
        "first_receive_s": receive[0],
    }


def _start(work: Callable[..., None], host: str, args: tuple[Any, ...]) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_be, args=(host, work, theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _be(host: str, work: Callable[..., None], *args: Any) -> None:
    os.environ |= SOCKETS | {"NCCL_HOSTID": host}
    work(*args)


def _ask(other: tuple[Any, Connection], message: Any) -> Any:
    other[1].send(message)
    if not other[1].poll(DEADLINE):
        raise SystemExit("a process did not answer")
    return other[1].recv()


def _train(pipe: Connection, megabytes: int, folder: str) -> None:
    named = tensors_of(megabytes, "cuda")
    sender = make_sender(PointToPointWeights(), RunPaths(Path(folder)))
    while True:
        version = pipe.recv()
        torch.cuda.synchronize()
        started = time.perf_counter()
        update = sender.publish(version, named.items())
        pipe.send((time.perf_counter() - started, msgspec.json.encode(update)))


def _serve(pipe: Connection, megabytes: int, folder: str) -> None:
    places = {name: torch.empty_like(tensor) for name, tensor in tensors_of(megabytes, "cuda").items()}
    receiver = make_receiver("cuda")
    while True:
        update = msgspec.json.decode(pipe.recv(), type=WeightUpdate)
        started = time.perf_counter()
        for _ in receiver.receive(update, places):
            pass
        torch.cuda.synchronize()
        pipe.send(time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "weights_nccl_h200.json")
    options = parser.parse_args()
    result = {"device": torch.cuda.get_device_name(), "megabytes": options.megabytes, "wire": "loopback sockets"}
    result |= {backend: measure(backend, options.megabytes, options.rounds) for backend in HOSTS}
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
