"""Fingerprints: equal over any sharding, different for any change of bits, places, names, shapes or dtypes."""

import multiprocessing
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.transport.weights.fingerprint import Fingerprint, fingerprint_of, host
from headway.transport.weights.fingerprint.device import DeviceCounter, can_copy_and_count
from headway.transport.weights.fingerprint.reference import (
    KEYS,
    MASK,
    ROW,
    ROW_BYTES,
    UNIT,
    Batch,
    Checksum,
    checksum_of,
    row_sums,
)

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
        total.merge(ranks[rank].shards())
    assert total.hexdigest() == _digest(tensor)
    assert total.sums() == fingerprint_of([("w", tensor)]).sums()


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
    with pytest.raises(ValueError, match="disagrees"):
        fingerprint.add("w", torch.zeros(2), 2, (4,), torch.bfloat16)


def _formula(data: bytes, offset: int) -> Checksum:
    """What the checksum is said to be, word by word, all rows partial."""
    padded = bytes(offset % 8) + data
    checksum = Checksum()
    for start in range(0, len(padded), 8):
        word = int.from_bytes(padded[start : start + 8], "little")
        row, place = divmod(offset // 8 + start // 8, ROW)
        keyed = (word & 0xFFFFFFFF) * int(KEYS[2 * place]) + (word >> 32) * int(KEYS[2 * place + 1])
        checksum.merge(Checksum(partial={row: (word, keyed & MASK)}))
    return checksum


COUNTERS = {
    "compiled": lambda data, offset: host.counter()(data, offset, None),
    "reference": lambda data, offset: host.count_by_torch(data, offset),
    "threads": lambda data, offset: _merged(host.count_on_host(data, offset)),
    "device": lambda data, offset: _on_device((data, offset))[0],
}


def _on_device(*parts: tuple[Tensor, int]) -> list[Checksum]:
    counts: DeviceCounter[int] = DeviceCounter()
    for key, (data, offset) in enumerate(parts):
        counts.add(key, data, offset)
    found = list(counts.fetch())
    assert [key for key, _ in found] == list(range(len(parts)))
    return [checksum for _, checksum in found]


def _merged(parts: list[Checksum | Future[Checksum]]) -> Checksum:
    total = Checksum()
    for part in parts:
        total.merge(part if isinstance(part, Checksum) else part.result())
    return total


def test_no_two_keys_are_equal_and_all_are_odd() -> None:
    assert len(set(KEYS.tolist())) == 2 * ROW and (KEYS % 2 == 1).all()


@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize(
    ("size", "offset"),
    [(1, 0), (616, 3), (3 * ROW_BYTES + 40, 8 * ROW_BYTES), (40_000, 12), (5600, ROW_BYTES - 40), (9, ROW_BYTES + 3)],
)
def test_the_sums_are_what_they_are_said_to_be(counter: str, size: int, offset: int) -> None:
    data = _bits(size, size, torch.uint8)
    assert COUNTERS[counter](data, offset).total() == _formula(bytes(data.tolist()), offset).total()


def test_there_is_a_compiled_pass_where_there_is_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert host.counter() is not host.count_by_torch
    monkeypatch.setenv("CC", "no-such-compiler")
    host.counter.cache_clear()
    with caplog.at_level("INFO", "headway.transport.weights"):
        assert host.counter() is host.count_by_torch
    assert "no C compiler" in caplog.text
    host.counter.cache_clear()


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 5 * ROW_BYTES), st.integers(0, 3 * ROW_BYTES), st.integers(0, 9), st.data()
)
def test_every_pass_gives_the_same_checksum_and_copies_alike(
    seed: int, size: int, offset: int, skew: int, data: st.DataObject
) -> None:
    """Wherever the bytes lie in memory, and wherever they lie in the tensor."""
    source = _bits(seed, size + skew, torch.uint8)[skew:]
    shift = data.draw(st.integers(0, 9))
    targets = [torch.zeros(size + 20, dtype=torch.uint8) for _ in range(2)]
    counts = [host.counter(), host.count_by_torch]
    found = [count(source, offset, target[shift : shift + size]) for count, target in zip(counts, targets, strict=True)]
    assert found[0] == found[1] == _on_device((source, offset))[0]
    assert torch.equal(targets[0], targets[1])
    assert torch.equal(targets[0][shift : shift + size], source)
    assert not targets[0][:shift].any() and not targets[0][shift + size :].any()


def test_threads_and_the_device_give_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_SHARE", 32 * ROW_BYTES)
    data, offset = _bits(5, 250 * ROW_BYTES + 5, torch.uint8), ROW_BYTES + 77
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(COUNTERS["threads"](data, offset))
    torch.set_num_threads(before)
    assert found == [COUNTERS["device"](data, offset)] * 2


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("skew", [0, 4])
@pytest.mark.parametrize("count", [40 * ROW + 3, 600_000])
def test_what_is_copied_on_the_way_arrives(threads: int, skew: int, count: int) -> None:
    tensor = _bits(6, count, torch.float32)
    place = torch.zeros(tensor.nbytes + 8, dtype=torch.uint8)[skew : skew + tensor.nbytes]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    fingerprint = Fingerprint()
    fingerprint.add("w", tensor, copy=place)
    assert fingerprint.hexdigest() == _digest(tensor)
    torch.set_num_threads(before)
    assert torch.equal(place, tensor.view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 12), st.sampled_from(DTYPES))
def test_a_cut_within_the_first_word_of_a_row_adds_up(before: int, after: int, dtype: torch.dtype) -> None:
    """There a shard holds all words of a row, and yet not all of the row."""
    row = ROW_BYTES // dtype.itemsize
    whole = _bits(before, 3 * row, dtype)
    cut = row + after
    total = Fingerprint()
    total.add("w", whole[cut:], cut, whole.shape)
    total.add("w", whole[:cut], 0, whole.shape)
    assert total.hexdigest() == _digest(whole)


def _copy_and_count_by_kernel() -> None:
    from headway.transport.weights.fingerprint.triton_kernel import count_by_triton

    for copies in (False, True):
        batch, found = Batch(), []
        for number, (size, offset) in enumerate([(80, 16), (70 * ROW_BYTES + 48, ROW_BYTES - 16), (9000, 8)]):
            source, target = (_aligned(size, offset) for _ in range(2))
            source.copy_(_bits(number, size, torch.uint8))
            batch.data.append(source)
            batch.copies += [target] if copies else []
            batch.offsets.append(offset)
            batch.sizes.append(size)
            batch.last.append(False)
            found.append((source, target, offset))
        for sums, (source, target, offset) in zip(count_by_triton(batch)().tolist(), found, strict=True):
            wanted = checksum_of(offset, len(source), tuple(sums[:2]), tuple(sums[2:4]), tuple(sums[4:]))
            assert wanted == COUNTERS["reference"](source, offset)
            assert torch.equal(source, target) == copies


def _aligned(size: int, offset: int) -> Tensor:
    """Memory that begins at a unit of the whole tensor where `offset` does."""
    memory = torch.zeros(size + 32, dtype=torch.uint8)
    start = (offset - memory.data_ptr()) % UNIT
    return memory[start : start + size]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests below run the kernel on the GPU")
def test_the_kernel_agrees_with_the_reference_in_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    process = multiprocessing.get_context("spawn").Process(target=_copy_and_count_by_kernel)
    process.start()
    process.join()
    assert process.exitcode == 0


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLACES = [(8, 0), (80, 16), (77, 3), (50 * ROW_BYTES + 3, ROW_BYTES * 4 + 12), (4_000 * ROW_BYTES, 0), (9, 4099)]
PLACES += [(200 * ROW_BYTES + 48, ROW_BYTES - 16), (130 * ROW_BYTES - 8, 8), (64 * ROW_BYTES, 3 * ROW_BYTES)]


@pytest.mark.gpu
@GPU
def test_the_gpu_agrees_with_the_cpu() -> None:
    parts = [(_bits(number, size, torch.uint8), offset) for number, (size, offset) in enumerate(PLACES * 12)]
    assert _on_device(*((data.cuda(), offset) for data, offset in parts)) == [
        COUNTERS["compiled"](data, offset) for data, offset in parts
    ]
    for last in (False, True):
        counts: DeviceCounter[int] = DeviceCounter()
        for number, (data, offset) in enumerate(parts):
            counts.add(number, data.cuda(), offset, last=last)
        for number, found in counts.fetch():
            data, offset = parts[number]
            plain, keyed, *partial = row_sums(data.cuda(), offset, last).cpu().numpy().view(np.uint64).tolist()
            wanted = checksum_of(offset, len(data), (plain, keyed), tuple(partial[:2]), tuple(partial[2:]), last=last)
            assert found == wanted
            assert found.total() == COUNTERS["compiled"](data, offset).total()


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("skew", [0, 1])
def test_the_gpu_counts_what_it_copies(dtype: torch.dtype, skew: int) -> None:
    """As bfloat16: in one pass or, where memory lies badly, in several; shards have their own place in the whole."""
    fused = copied = 0
    for number, (size, offset) in enumerate(PLACES):
        count, begin = (size + 1) // 2, offset // 2
        source = torch.randn(count + 16 + begin % 8, device="cuda", generator=_cuda_draw(number)).to(dtype)
        source = source[begin % 8 + skew :][:count]
        around = torch.full((2 * count + 4096,), 7, dtype=torch.uint8, device="cuda")
        place = around[2 * (begin % 8) + 512 :][: 2 * count]
        fingerprint = Fingerprint()
        fingerprint.add("w", source, begin, (begin + count + number % 2,), torch.bfloat16, copy=place)
        wanted, want = source.to(torch.bfloat16).cpu(), Fingerprint()
        want.add("w", wanted, begin, (begin + count + number % 2,))
        assert fingerprint.hexdigest() == want.hexdigest()
        assert torch.equal(place.view(torch.bfloat16).cpu().view(torch.int16), wanted.view(torch.int16))
        start = 2 * (begin % 8) + 512
        assert (around[:start] == 7).all() and (around[start + 2 * count :] == 7).all()
        copied += 1
        fused += can_copy_and_count(source, place.view(torch.bfloat16), 2 * begin)
    assert 0 < fused < copied if skew == 0 else fused == 0


def _cuda_draw(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)
