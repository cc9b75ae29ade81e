"""Seconds for a weight update by each transport, against this machine's copy bandwidth in the same run.

    python benchmarks/weights.py --megabytes 512

An update is: the trainer publishes B bytes, an engine receives them all, both sides fingerprint them. The bar on one
host is 3·B / copy bandwidth: 3 `host_copies`. `fingerprint_share` is both sides' fingerprints by themselves, against
the whole update.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.config.shared import CollectiveWeights, FilesystemWeights, SharedMemoryWeights, WeightTransport
from headway.core.runs import RunPaths
from headway.transport.weights import make_receiver, make_sender
from headway.transport.weights.fingerprint import fingerprint_of

RESULTS = Path(__file__).parent / "results"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def tensors_of(megabytes: int, device: str) -> dict[str, Tensor]:
    """bf16 tensors in the proportions of a transformer: matrices, and norms between them."""
    width = 2048
    layers = max(1, megabytes * 2**20 // (width * width * 2))
    named: dict[str, Tensor] = {}
    for layer in range(layers):
        named[f"model.layers.{layer}.mlp.weight"] = torch.randn(width, width, device=device).bfloat16()
        named[f"model.layers.{layer}.norm.weight"] = torch.ones(width, device=device, dtype=torch.bfloat16)
    return named


def seconds_of(work: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
    """The median, after a first time that touches all memory."""
    work()
    times = []
    for _ in range(repeats):
        started = clock()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(clock() - started)
    return statistics.median(times)


def measure(
    settings: WeightTransport,
    named: dict[str, Tensor],
    target: dict[str, Tensor],
    repeats: int,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Medians in seconds of publishing and receiving, the latter into tensors that the engine has already."""
    with tempfile.TemporaryDirectory() as folder:
        device = next(iter(target.values())).device
        sender, receiver = make_sender(settings, RunPaths(Path(folder) / "run")), make_receiver(str(device))
        publish, receive = [], []
        for version in range(repeats + 2):
            started = clock()
            update = sender.publish(version, named.items())
            published = clock()
            for name, tensor in receiver.receive(update):
                target[name].copy_(tensor)
            publish.append(published - started)
            receive.append(clock() - published)
        sender.close()
    return statistics.median(publish[2:]), statistics.median(receive[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="where the trainer's weights are")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: on a busy machine, with OMP_NUM_THREADS=1"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "weights.json")
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    named = tensors_of(options.megabytes, options.device)
    size = sum(tensor.nbytes for tensor in named.values())
    target = {name: torch.empty_like(tensor) for name, tensor in named.items()}
    copy = seconds_of(lambda: [target[name].copy_(tensor) for name, tensor in named.items()], options.repeats, clock)
    fingerprint = seconds_of(lambda: fingerprint_of(named.items()).hexdigest(), options.repeats, clock)
    host = {name: tensor.cpu() for name, tensor in named.items()}
    spare = {name: torch.empty_like(tensor) for name, tensor in host.items()}
    host_copy = seconds_of(lambda: [spare[name].copy_(tensor) for name, tensor in host.items()], options.repeats, clock)
    result: dict[str, Any] = {
        "machine": platform.machine(),
        "device": options.device,
        "threads": torch.get_num_threads(),
        "clock": options.clock,
        "bytes": size,
        "copy_gb_per_s": size / copy / 1e9,
        "fingerprint_gb_per_s": size / fingerprint / 1e9,
        "host_copy_gb_per_s": size / host_copy / 1e9,
        "transports": {},
    }
    for settings in (SharedMemoryWeights(), CollectiveWeights(), FilesystemWeights()):
        publish, receive = measure(settings, named, target, options.repeats, clock)
        result["transports"][settings.type] = {
            "publish_s": publish,
            "receive_s": receive,
            "host_copies": (publish + receive) / host_copy,
            "fingerprint_share": 2 * fingerprint / (publish + receive),
        }
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
