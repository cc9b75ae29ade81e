"""Seconds for a weight update by each transport, against this machine's copy bandwidth in the same run.

    OMP_NUM_THREADS=1 python benchmarks/weights.py --megabytes 512

An update is: the trainer publishes B bytes, an engine receives them all into its parameters, both sides fingerprint
them. The bar on one host is 3·B / copy bandwidth: 3 `copies`. Updates with fingerprints and without, and plain copies,
take turns, and medians are compared: `fingerprint_share` is what an update without them takes less. Everything is
measured by the wall clock and by the processor's time; on a busy machine only the latter means anything.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from headway.config.shared import FilesystemWeights, PointToPointWeights, SharedMemoryWeights, WeightTransport
from headway.core.runs import RunPaths
from headway.transport.weights import fingerprint, make_receiver, make_sender
from headway.transport.weights.fingerprint import device
from headway.transport.weights.fingerprint.device import DeviceCounter
from headway.transport.weights.fingerprint.reference import Batch

RESULTS = Path(__file__).parent / "results"
WARM_UP = 2
"""Rounds that touch all memory for the first time."""


class Seconds(NamedTuple):
    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Seconds":
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return cls(time.perf_counter(), time.process_time())

    def since(self, started: "Seconds") -> "Seconds":
        return Seconds(self.wall - started.wall, self.cpu - started.cpu)


class Update(NamedTuple):
    """Seconds of both sides by one clock."""

    publish: float
    receive: float


def tensors_of(megabytes: int, device: str) -> dict[str, Tensor]:
    """bf16 tensors in the proportions of a transformer: matrices, and norms between them."""
    width = 2048
    layers = max(1, megabytes * 2**20 // (width * width * 2))
    named: dict[str, Tensor] = {}
    for layer in range(layers):
        named[f"model.layers.{layer}.mlp.weight"] = torch.randn(width, width, device=device).bfloat16()
        named[f"model.layers.{layer}.norm.weight"] = torch.ones(width, device=device, dtype=torch.bfloat16)
    return named


@contextmanager
def no_fingerprints(wanted: bool = True) -> Iterator[None]:
    """If `wanted`, bytes are copied in the same way and not counted: both sides then agree that all sums are zero."""
    with ExitStack() as patches:
        if wanted:
            patches.enter_context(patch.object(fingerprint, "count_on_host", _copy))
            patches.enter_context(patch.object(device, "count_batch", _copy_batch))
            patches.enter_context(patch.object(DeviceCounter, "fetch", _end))
        yield


def _copy(data: Tensor, offset: int, copy: Tensor | None = None) -> list[Any]:
    if copy is not None:
        copy.view(-1).view(torch.uint8).copy_(data.view(-1).view(torch.uint8))
    return []


def _copy_batch(batch: Batch) -> Any:
    if not batch.copies:
        return None
    # There is no Triton without a GPU.
    from headway.transport.weights.fingerprint.triton_kernel import count_by_triton

    return count_by_triton(batch, count=False)


def _end(self: DeviceCounter[Any]) -> list[Any]:
    self.wait()
    self._launched.clear()
    return []


def measure(
    settings: WeightTransport, named: dict[str, Tensor], target: dict[str, Tensor], rounds: int
) -> dict[str, dict[str, float]]:
    """By each clock: the two sides, how they stand to a copy in the host's memory, and what fingerprints cost."""
    host = {name: tensor.cpu() for name, tensor in named.items()}
    spare = {name: torch.empty_like(tensor) for name, tensor in host.items()}
    counted: list[tuple[Seconds, Seconds]] = []
    bare: list[tuple[Seconds, Seconds]] = []
    copies: list[Seconds] = []
    with tempfile.TemporaryDirectory() as folder:
        sender = make_sender(settings, RunPaths(Path(folder)))
        receiver = make_receiver(next(iter(target.values())).device.type)
        version = 0

        def update() -> tuple[Seconds, Seconds]:
            nonlocal version
            version += 1
            started = Seconds.now()
            posted = sender.publish(version, named.items())
            published = Seconds.now()
            for _ in receiver.receive(posted, target):
                pass
            return published.since(started), Seconds.now().since(published)

        for _ in range(rounds + WARM_UP):
            counted.append(update())
            with no_fingerprints():
                bare.append(update())
            copies.append(seconds_of(lambda: [spare[name].copy_(tensor) for name, tensor in host.items()]))
        sender.close()
        receiver.close()
    return {clock: judged(counted, bare, copies, index) for index, clock in enumerate(Seconds._fields)}


def judged(
    counted: list[tuple[Seconds, Seconds]], bare: list[tuple[Seconds, Seconds]], copies: list[Seconds], clock: int
) -> dict[str, float]:
    publish, receive = (statistics.median(update[side][clock] for update in counted[WARM_UP:]) for side in range(2))
    totals = [statistics.median(a[clock] + b[clock] for a, b in some[WARM_UP:]) for some in (counted, bare)]
    copy = statistics.median(seconds[clock] for seconds in copies[WARM_UP:])
    return {
        "publish_s": publish,
        "receive_s": receive,
        "copy_s": copy,
        "copies": totals[0] / copy,
        "fingerprint_share": 1 - totals[1] / totals[0],
    }


def seconds_of(work: Callable[[], Any]) -> Seconds:
    started = Seconds.now()
    work()
    return Seconds.now().since(started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu", help="where the trainer's and the engine's weights are")
    parser.add_argument("--transports", nargs="+", default=["shared_memory", "point_to_point", "filesystem"])
    parser.add_argument("--output", type=Path, default=RESULTS / "weights.json")
    options = parser.parse_args()
    named = tensors_of(options.megabytes, options.device)
    target = {name: torch.empty_like(tensor) for name, tensor in named.items()}
    result: dict[str, Any] = {
        "machine": platform.machine(),
        "device": options.device,
        "threads": torch.get_num_threads(),
        "bytes": sum(tensor.nbytes for tensor in named.values()),
        "transports": {},
    }
    for settings in (SharedMemoryWeights(), PointToPointWeights(), FilesystemWeights()):
        if settings.type in options.transports:
            result["transports"][settings.type] = measure(settings, named, target, options.rounds)
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
