"""Seconds for a weight update by each transport, against this machine's copy bandwidth in the same run.

    python benchmarks/weights.py --megabytes 512

An update is: the trainer publishes B bytes, an engine receives them all into its parameters, both sides fingerprint
them. The bar on one host is 3·B / copy bandwidth: 3 `host_copies`. `fingerprint_share` is both sides' fingerprints by
themselves, against the whole update. Everything is measured by the wall clock and by the processor's time; on a busy
machine only the latter means anything.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.config.shared import CollectiveWeights, FilesystemWeights, SharedMemoryWeights, WeightTransport
from headway.core.runs import RunPaths
from headway.transport.weights import make_receiver, make_sender
from headway.transport.weights.fingerprint import fingerprint_of

RESULTS = Path(__file__).parent / "results"


class Seconds(NamedTuple):
    wall: float
    cpu: float

    @classmethod
    def now(cls) -> "Seconds":
        return cls(time.perf_counter(), time.process_time())

    def since(self, started: "Seconds") -> "Seconds":
        return Seconds(self.wall - started.wall, self.cpu - started.cpu)


def median(times: list[Seconds]) -> Seconds:
    return Seconds(*(statistics.median(column) for column in zip(*times, strict=True)))


def tensors_of(megabytes: int, device: str) -> dict[str, Tensor]:
    """bf16 tensors in the proportions of a transformer: matrices, and norms between them."""
    width = 2048
    layers = max(1, megabytes * 2**20 // (width * width * 2))
    named: dict[str, Tensor] = {}
    for layer in range(layers):
        named[f"model.layers.{layer}.mlp.weight"] = torch.randn(width, width, device=device).bfloat16()
        named[f"model.layers.{layer}.norm.weight"] = torch.ones(width, device=device, dtype=torch.bfloat16)
    return named


def seconds_of(work: Callable[[], Any], repeats: int) -> Seconds:
    """The median, after a first time that touches all memory."""
    work()
    times = []
    for _ in range(repeats):
        started = Seconds.now()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(Seconds.now().since(started))
    return median(times)


def measure(
    settings: WeightTransport, named: dict[str, Tensor], target: dict[str, Tensor], repeats: int
) -> tuple[Seconds, Seconds]:
    """Medians of publishing and receiving, the latter into tensors that the engine has already."""
    with tempfile.TemporaryDirectory() as folder:
        device = next(iter(target.values())).device
        sender, receiver = make_sender(settings, RunPaths(Path(folder) / "run")), make_receiver(str(device))
        publish, receive = [], []
        for version in range(repeats + 2):
            started = Seconds.now()
            update = sender.publish(version, named.items())
            published = Seconds.now()
            for name, tensor in receiver.receive(update):
                target[name].copy_(tensor)
            publish.append(published.since(started))
            receive.append(Seconds.now().since(published))
        sender.close()
        receiver.close()
    return median(publish[2:]), median(receive[2:])


def judged(publish: Seconds, receive: Seconds, host_copy: Seconds, fingerprint: Seconds) -> dict[str, dict[str, float]]:
    """By each clock: the two sides, and how they stand to copying and to fingerprints."""
    return {
        clock: {
            "publish_s": getattr(publish, clock),
            "receive_s": getattr(receive, clock),
            "host_copies": (getattr(publish, clock) + getattr(receive, clock)) / getattr(host_copy, clock),
            "fingerprint_share": 2 * getattr(fingerprint, clock) / (getattr(publish, clock) + getattr(receive, clock)),
        }
        for clock in Seconds._fields
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="where the trainer's weights are")
    parser.add_argument("--output", type=Path, default=RESULTS / "weights.json")
    options = parser.parse_args()
    named = tensors_of(options.megabytes, options.device)
    size = sum(tensor.nbytes for tensor in named.values())
    target = {name: torch.empty_like(tensor) for name, tensor in named.items()}
    copy = seconds_of(lambda: [target[name].copy_(tensor) for name, tensor in named.items()], options.repeats)
    fingerprint = seconds_of(lambda: fingerprint_of(named.items()).hexdigest(), options.repeats)
    host = {name: tensor.cpu() for name, tensor in named.items()}
    spare = {name: torch.empty_like(tensor) for name, tensor in host.items()}
    host_copy = seconds_of(lambda: [spare[name].copy_(tensor) for name, tensor in host.items()], options.repeats)
    result: dict[str, Any] = {
        "machine": platform.machine(),
        "device": options.device,
        "threads": torch.get_num_threads(),
        "bytes": size,
        "gb_per_s": {
            clock: {
                "copy": size / getattr(copy, clock) / 1e9,
                "host_copy": size / getattr(host_copy, clock) / 1e9,
                "fingerprint": size / getattr(fingerprint, clock) / 1e9,
            }
            for clock in Seconds._fields
        },
        "transports": {},
    }
    for settings in (SharedMemoryWeights(), CollectiveWeights(), FilesystemWeights()):
        publish, receive = measure(settings, named, target, options.repeats)
        result["transports"][settings.type] = judged(publish, receive, host_copy, fingerprint)
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
