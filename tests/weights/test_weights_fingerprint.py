"""Fingerprints: equal over any sharding, different for any change of bits, places, names, shapes or dtypes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.transport.weights import checksum_host
from headway.transport.weights.checksum import ROW, Tally, words_of
from headway.transport.weights.checksum_device import count_on_device, fetch_tallies
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
    _bits, st.integers(0, 2**32), st.one_of(st.integers(1, 70), st.integers(1, 20 * ROW)), st.sampled_from(DTYPES)
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
    row = ROW * 8 // dtype.itemsize
    tensor = torch.ones(4 * row, dtype=dtype)
    tensor[::2] = -1
    before = _digest(tensor)
    for first, second in [(0, 1), (1, 2), (3, 4 * row - 4), (2, row + 1), (7, 8), (1, 2 * row), (7, 66), (3, row + 8)]:
        swapped = tensor.clone()
        swapped[[first, second]] = tensor[[second, first]]
        assert _digest(swapped) != before


FAULTS = {
    "negated": lambda w: -w,
    "negated in a rectangle": lambda w: torch.cat([torch.cat([-w[:8, :512], w[:8, 512:]], 1), w[8:]]),
    "rows swapped": lambda w: w[[1, 0, *range(2, len(w))]],
    "halves swapped": lambda w: w.roll(len(w) // 2, 0),
    "columns swapped": lambda w: w.roll(1024, 1),
    "shifted by an element": lambda w: w.reshape(-1).roll(1).view(w.shape),
    "transposed": lambda w: w.view(-1, 64).t().reshape(w.shape),
    "cut off": lambda w: torch.cat([w[:-1], torch.zeros_like(w[-1:])]),
    "one row stale": lambda w: torch.cat([w[:5], w[5:6] + 1, w[6:]]),
    "two rows twice": lambda w: torch.cat([w[:2], w[:2], w[4:]]),
    "lines within a row swapped": lambda w: w.view(-1, 2, 32).flip(1).reshape(w.shape),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_may_go_wrong_on_the_way_shows(fault: str, dtype: torch.dtype) -> None:
    weights = torch.randn(16, 4096, generator=torch.Generator().manual_seed(7)).to(dtype)
    assert _digest(FAULTS[fault](weights)) != _digest(weights)


def test_two_tensors_that_traded_places_show() -> None:
    one, other = _bits(1, 3000, torch.float32), _bits(2, 3000, torch.float32)
    assert (
        fingerprint_of([("a", one), ("b", other)]).hexdigest() != fingerprint_of([("a", other), ("b", one)]).hexdigest()
    )


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


def _formula(tensor: Tensor, byte_offset: int) -> Tally:
    """What the checksum is said to be, word by word."""
    data = bytes(byte_offset % 8) + bytes(tensor.view(torch.uint8).tolist())
    sums: dict[int, int] = {}
    parity = places = 0
    for start in range(0, len(data), 8):
        word = int.from_bytes(data[start : start + 8], "little")
        row, place = divmod(byte_offset // 8 + start // 8, ROW)
        sums[row] = (sums.get(row, 0) + word) % 2**64
        parity ^= word
        for bit in range(10):
            places ^= (word << bit) * (place >> bit & 1)
    for bit in range(74, 63, -1):
        places ^= (2**64 + 0b11011 << bit - 64) * (places >> bit & 1)
    return Tally(0, sums, parity, places)


def _tally(tensor: Tensor, offset: int) -> Tally:
    total = Tally()
    for part in checksum_host.begin(*words_of(tensor, offset)):
        total.merge(part if isinstance(part, Tally) else part.result())
    return total


def _tally_on_device(tensor: Tensor, offset: int) -> Tally:
    return fetch_tallies([count_on_device(*words_of(tensor, offset))])[0]


def _essence(tally: Tally) -> tuple[int, int, int]:
    return tally.total(), tally.parity, tally.places


@pytest.mark.parametrize(
    ("count", "offset"), [(1, 0), (77, 3), (3 * ROW + 5, 8 * ROW), (5 * ROW, 12), (700, 8 * ROW - 40)]
)
def test_the_sums_are_what_they_are_said_to_be(count: int, offset: int) -> None:
    tensor = _bits(count, 8 * count + 3, torch.uint8)
    assert _essence(_tally(tensor, offset)) == _essence(_formula(tensor, offset))
    assert _essence(_tally_on_device(tensor, offset)) == _essence(_formula(tensor, offset))


def test_threads_and_the_device_give_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum_host, "_SPAN", 16 * ROW)
    monkeypatch.setattr(checksum_host, "_SHARE", 32 * ROW)
    tensor, offset = _bits(5, 250 * ROW + 5, torch.float32), 8 * (ROW + 77)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(_essence(_tally(tensor, offset)))
    torch.set_num_threads(before)
    assert found == [_essence(_tally_on_device(tensor, offset))] * 2


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("skew", [0, 4])
def test_what_is_copied_on_the_way_arrives(threads: int, skew: int) -> None:
    tensor = _bits(6, 40 * ROW + 3, torch.float32)
    place = torch.zeros(tensor.nbytes + 8, dtype=torch.uint8)[skew : skew + tensor.nbytes]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    fingerprint = Fingerprint()
    fingerprint.add("w", tensor, copy=place)
    assert fingerprint.hexdigest() == _digest(tensor)
    torch.set_num_threads(before)
    assert torch.equal(place, tensor.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_agrees_with_the_cpu() -> None:
    for count, offset in [(1, 0), (77, 3), (50 * ROW + 3, ROW * 4 + 12), (40_000 * ROW, 0)]:
        tensor = _bits(count, count, torch.bfloat16)
        assert _essence(_tally_on_device(tensor.cuda(), offset)) == _essence(_tally(tensor, offset))
