"""Fingerprints: equal over any sharding, different for any change of bits, places, names, shapes or dtypes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.transport.weights import checksum
from headway.transport.weights.checksum import BLOCK, block_keys, keyed_sum, place_keys
from headway.transport.weights.checksum_device import _plain_sum
from headway.transport.weights.fingerprint import Fingerprint, fingerprint_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int32, torch.uint8]
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(seed: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)


def _digest(tensor: Tensor, name: str = "w") -> str:
    return fingerprint_of([(name, tensor)]).hexdigest()


tensors = st.builds(
    _bits, st.integers(0, 2**32), st.one_of(st.integers(1, 70), st.integers(1, 5 * BLOCK)), st.sampled_from(DTYPES)
)


@settings(max_examples=60, deadline=None)
@given(tensors, st.data())
def test_any_sharding_has_the_fingerprint_of_the_whole(tensor: Tensor, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(tensor)), max_size=5).map(sorted))
    bounds = [0, *cuts, len(tensor)]
    ranks = [Fingerprint() for _ in bounds[1:]]
    order = data.draw(st.permutations(range(len(ranks))))
    for rank in order:
        start, end = bounds[rank], bounds[rank + 1]
        ranks[rank].add("w", tensor[start:end], start, tensor.shape)
    total = Fingerprint()
    for rank in order:
        total.merge(ranks[rank])
    assert total.hexdigest() == _digest(tensor)
    assert total.tensors() == fingerprint_of([("w", tensor)]).tensors()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.sampled_from(DTYPES))
def test_rows_dealt_to_ranks_as_fsdp_does_add_up(rows: int, columns: int, ranks: int, dtype: torch.dtype) -> None:
    whole = _bits(rows * 10 + columns, rows * columns, dtype).view(rows, columns)
    total, row = Fingerprint(), 0
    for part in whole.chunk(ranks):
        total.add("w", part, row * columns, whole.shape)
        row += len(part)
    assert total.hexdigest() == _digest(whole)


@settings(max_examples=120, deadline=None)
@given(tensors, st.data())
def test_any_flipped_bit_changes_the_fingerprint(tensor: Tensor, data: st.DataObject) -> None:
    raw = tensor.view(torch.uint8)
    place = data.draw(st.integers(0, len(raw) - 1))
    before = _digest(tensor)
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    assert _digest(tensor) != before


@settings(max_examples=120, deadline=None)
@given(tensors, st.data())
def test_a_swapped_pair_changes_the_fingerprint(tensor: Tensor, data: st.DataObject) -> None:
    raw = tensor.view(INTS[tensor.dtype.itemsize])
    places = st.integers(0, len(raw) - 1)
    first, second = data.draw(places), data.draw(places)
    before, same = _digest(tensor), bool(raw[first] == raw[second])
    raw[[first, second]] = raw[[second, first]]
    assert (_digest(tensor) == before) == same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_swapped_signs_show_wherever_they_stand(dtype: torch.dtype) -> None:
    """The top bit of the top half is where a sum mod 2^64 is blindest."""
    tensor = torch.ones(4 * BLOCK, dtype=dtype)
    tensor[::2] = -1
    before = _digest(tensor)
    for first, second in [(0, 1), (1, 2), (3, 4 * BLOCK - 4), (2, BLOCK + 1), (7, 8), (1, 3 * BLOCK)]:
        swapped = tensor.clone()
        swapped[[first, second]] = tensor[[second, first]]
        assert _digest(swapped) != before


def test_names_shapes_and_dtypes_count() -> None:
    tensor = _bits(1, 24, torch.float16)
    digests = {
        _digest(tensor),
        _digest(tensor, "renamed"),
        _digest(tensor.view(4, 6)),
        _digest(tensor.view(6, 4)),
        _digest(tensor.view(torch.bfloat16)),
        fingerprint_of([("w", tensor), ("empty", torch.empty(0))]).hexdigest(),
    }
    assert len(digests) == 6


def test_the_order_of_tensors_does_not_count() -> None:
    named = [(f"layer.{i}", _bits(i, 100, torch.float32)) for i in range(5)]
    assert fingerprint_of(named).hexdigest() == fingerprint_of(named[::-1]).hexdigest()


def test_a_strided_view_equals_its_copy() -> None:
    tensor = _bits(3, 60, torch.bfloat16).view(6, 10)
    assert _digest(tensor.t()) == _digest(tensor.t().contiguous())
    assert _digest(tensor.view(-1)[1:]) == _digest(tensor.view(-1)[1:].clone())


def test_shards_that_disagree_are_refused() -> None:
    fingerprint = Fingerprint()
    fingerprint.add("w", torch.zeros(2), 0, (4,))
    with pytest.raises(ValueError, match="disagrees"):
        fingerprint.add("w", torch.zeros(2), 2, (2, 2))
    with pytest.raises(ValueError, match="cannot stand for"):
        fingerprint.add("x", torch.zeros(2), dtype=torch.bfloat16)


def test_threads_and_the_device_formula_give_the_same_sum() -> None:
    tensor = _bits(5, 3 * 32 * BLOCK * 2 + 5, torch.float32)
    offset = 8 * (BLOCK + 77)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    one = int(keyed_sum(tensor, offset))
    torch.set_num_threads(2)
    two = int(keyed_sum(tensor, offset))
    torch.set_num_threads(before)
    words, first = checksum._words(tensor, offset)
    assert one == two == int(_plain_sum(words, first)) % 2**64


def test_keys_are_odd_and_their_low_bits_differ() -> None:
    places, blocks = place_keys(), block_keys(0, 64)
    keys = (places[None, :] * blocks[:, None]).ravel()
    assert np.all(keys & np.uint64(1))
    assert len(np.unique(keys & np.uint64(2**33 - 1))) == len(keys)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_agrees_with_the_cpu() -> None:
    for count, offset in [(1, 0), (77, 3), (5 * BLOCK + 3, BLOCK * 4 + 12), (40 * BLOCK, 0)]:
        tensor = _bits(count, count, torch.bfloat16)
        assert int(keyed_sum(tensor.cuda(), offset)) == int(keyed_sum(tensor, offset))
