"""Files that are filled in place: what safetensors reads of them, and what happens where there is no room."""

import resource
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headway.base.errors import HeadwayError
from headway.transport.weights.filesystem import tensor_file
from headway.transport.weights.shards import Shard


def shard(name: str, tensor: torch.Tensor) -> Shard:
    return Shard(name, tensor, 0, tuple(tensor.shape))


def test_safetensors_reads_what_was_filled_in(tmp_path: Path) -> None:
    kinds = (torch.bool, torch.float32, torch.uint8, torch.bfloat16, torch.float16, torch.int64)
    tensors = {f"t{n}": torch.randint(0, 2, (3, n)).to(kind) for n, kind in enumerate(kinds)}
    with tensor_file(tmp_path / "f", [shard(*item) for item in tensors.items()]) as places:
        for name, tensor in tensors.items():
            places[name].copy_(tensor.contiguous().view(-1).view(torch.uint8))
    found = load_file(tmp_path / "f")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_dtype_without_a_name_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(HeadwayError, match=r"odd: .*complex64"),
        tensor_file(tmp_path / "f", [shard("odd", torch.zeros(1, dtype=torch.complex64))]),
    ):
        pass


def test_no_room_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    worker = get_context("forkserver").Process(target=_fill_beyond_the_limit, args=(tmp_path / "f",))
    worker.start()
    worker.join()
    assert worker.exitcode == 0


def _fill_beyond_the_limit(path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with (
        pytest.raises(OSError, match="large"),
        tensor_file(path, [shard("big", torch.zeros(4096))]) as places,
    ):
        places["big"].zero_()
