"""Small values that ranks tell each other, as JSON has them."""

from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def gather_values(value: Any, group: ProcessGroup) -> list[Any]:
    """Return the values of all ranks of a group, in their order. Every rank calls this."""
    size = dist.get_world_size(group)
    data = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = data
    found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(found, padded, group=group)
    parts = zip(found, sizes, strict=True)
    return [msgspec.json.decode(part[: int(length)].numpy().tobytes()) for part, length in parts]
