"""Every transport brings the same tensors, whole or not at all, and says so when it can't."""

import errno
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.config.shared import FilesystemWeights, PointToPointWeights, SharedMemoryWeights, WeightTransport
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.announcements import announced, latest, withdraw
from headway.transport.weights import host_memory, make_receiver, make_sender, process_pairs, shared_memory
from headway.transport.weights.fingerprint import fingerprint_of
from headway.transport.weights.mapped_memory import MappedMemory
from headway.transport.weights.point_to_point import PointToPointSender

TRANSPORTS = [FilesystemWeights(), SharedMemoryWeights(), PointToPointWeights()]
every_transport = pytest.mark.parametrize("settings", TRANSPORTS, ids=lambda settings: settings.type)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pairs, "TIMEOUT", process_pairs.timedelta(seconds=5))


def _weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(33, 65, generator=generator)
    return {
        "embed": matrix,
        "layers.0.w": torch.randn(1000, 7, generator=generator).bfloat16(),
        "layers.0.strided": matrix.t(),
        "layers.1.half": torch.randn(11, generator=generator).half(),
        "layers.1.eight": torch.randn(13, generator=generator).to(torch.float8_e4m3fn),
        "ints": torch.arange(5),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "tied": matrix,
    }


def _same(received: dict[str, Tensor], sent: dict[str, Tensor]) -> bool:
    assert received.keys() == sent.keys()
    assert all(received[n].dtype == t.dtype and received[n].shape == t.shape for n, t in sent.items())
    return fingerprint_of(received.items()).hexdigest() == fingerprint_of(sent.items()).hexdigest()


def _receive(update: WeightUpdate) -> dict[str, Tensor]:
    return dict(make_receiver().receive(update))


@every_transport
def test_an_engine_gets_what_the_trainer_published(settings: WeightTransport, paths: RunPaths) -> None:
    sender = make_sender(settings, paths)
    for version in range(4):
        update = sender.publish(version, _weights(version).items())
        assert update == latest(paths)
        assert update.version == version
        assert update.fingerprint == fingerprint_of(_weights(version).items()).hexdigest()
        assert _same(_receive(update), _weights(version))
    sender.close()


@every_transport
def test_one_engine_takes_version_after_version(settings: WeightTransport, paths: RunPaths) -> None:
    sender, receiver = make_sender(settings, paths), make_receiver()
    for version in range(4):
        update = sender.publish(version, _weights(version).items())
        assert _same({name: tensor.clone() for name, tensor in receiver.receive(update)}, _weights(version))
    receiver.close()
    sender.close()


@every_transport
def test_tensors_are_cast_on_their_way(settings: WeightTransport, paths: RunPaths) -> None:
    sender, receiver = make_sender(settings, paths), make_receiver()
    for version in range(3):
        update = sender.publish(version, _weights(version).items(), dtype=torch.bfloat16)
        want = {name: tensor.to(torch.bfloat16) for name, tensor in _weights(version).items()}
        assert update.fingerprint == fingerprint_of(want.items()).hexdigest()
        assert _same(dict(receiver.receive(update)), want)
    receiver.close()
    sender.close()


def test_views_are_reused_as_long_as_versions_have_the_same_layout(paths: RunPaths) -> None:
    sender, memory = make_sender(SharedMemoryWeights(), paths), MappedMemory()

    def elements(version: int, named: dict[str, Tensor]) -> list[Tensor]:
        return [arrival.elements for arrival in shared_memory.fetch(sender.publish(version, named.items()), memory)[1]]

    kept = [elements(version, _weights(version)) for version in range(6)]
    assert all(ours is theirs for ours, theirs in zip(kept[3], kept[5], strict=True))
    reshaped = _weights(7) | {"embed": torch.zeros(65, 33)}
    assert [len(found) for found in elements(7, reshaped)] == [len(found) for found in kept[5]]
    assert not any(ours is theirs for ours, theirs in zip(elements(9, reshaped), kept[5], strict=True))
    memory.release()
    sender.close()


@pytest.mark.parametrize("settings", [SharedMemoryWeights(), PointToPointWeights()], ids=lambda settings: settings.type)
def test_a_version_in_memory_does_not_wait_for_the_disk(
    settings: WeightTransport, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_sender(settings, paths)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda handle: pytest.fail("something was flushed"))
        update = sender.publish(1, _weights(1).items())
    assert update == latest(paths)
    sender.close()


@every_transport
def test_tensors_are_received_into_the_places_that_fit_them(settings: WeightTransport, paths: RunPaths) -> None:
    sender, receiver = make_sender(settings, paths), make_receiver()
    places = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in _weights(0).items()}
    places["layers.0.w"] = torch.zeros(1000, 7)
    places["tied"] = torch.zeros(65, 33).t()
    places["unknown"] = torch.zeros(3)
    for version in range(3):
        received = dict(receiver.receive(sender.publish(version, _weights(version).items()), places))
        assert _same(received, _weights(version))
    fits = {name for name, tensor in received.items() if tensor.data_ptr() == places[name].data_ptr()} - {"empty"}
    assert fits == {"embed", "layers.0.strided", "layers.1.half", "layers.1.eight", "ints", "scalar"}
    assert not places["layers.0.w"].any() and not places["unknown"].any()
    receiver.close()
    sender.close()


@every_transport
def test_the_version_before_the_newest_can_still_be_fetched_and_older_ones_are_gone(
    settings: WeightTransport, paths: RunPaths
) -> None:
    sender = make_sender(settings, paths)
    updates = [sender.publish(version, _weights(version).items()) for version in range(5)]
    assert _same(_receive(updates[3]), _weights(3))
    with pytest.raises(HeadwayError):
        _receive(updates[0])
    assert announced(paths) == [3, 4]
    sender.close()


@every_transport
def test_what_an_engine_copied_outlives_later_versions(settings: WeightTransport, paths: RunPaths) -> None:
    sender = make_sender(settings, paths)
    update = sender.publish(0, _weights(0).items())
    received = {name: tensor.clone() for name, tensor in make_receiver().receive(update)}
    for version in range(1, 4):
        sender.publish(version, _weights(version).items())
    sender.close()
    assert _same(received, _weights(0))


@every_transport
def test_the_last_version_outlives_the_trainer(settings: WeightTransport, paths: RunPaths) -> None:
    sender = make_sender(settings, paths)
    sender.publish(6, _weights(5).items())
    sender.publish(7, _weights(7).items(), adapter="tenant")
    sender.close()
    update = latest(paths)
    assert update is not None
    assert (update.version, update.adapter) == (7, "tenant")
    assert _same(_receive(update), _weights(7))


@every_transport
def test_an_adapter_travels_under_its_name(settings: WeightTransport, paths: RunPaths) -> None:
    sender = make_sender(settings, paths, "tutor")
    update = sender.publish(1, {"lora_A": torch.ones(2, 3)}.items(), adapter="tenant")
    assert (update.policy, update.adapter) == ("tutor", "tenant")
    assert _receive(update)["lora_A"].tolist() == [[1.0] * 3] * 2
    sender.close()


@every_transport
def test_a_run_that_goes_back_to_a_checkpoint_publishes_over_its_future(
    settings: WeightTransport, paths: RunPaths
) -> None:
    first = make_sender(settings, paths)
    for version in range(6):
        first.publish(version, _weights(version).items())
    first.close()
    second = make_sender(settings, paths)
    update = second.publish(4, _weights(40).items())
    assert latest(paths) == update
    assert _same(_receive(update), _weights(40))
    update = second.publish(5, _weights(50).items())
    assert _same(_receive(update), _weights(50))
    second.close()


@every_transport
def test_weights_with_another_fingerprint_are_refused(settings: WeightTransport, paths: RunPaths) -> None:
    sender = make_sender(settings, paths)
    update = sender.publish(1, _weights(1).items())
    wrong = WeightUpdate(1, "0" * 32, update.transport)
    with pytest.raises(HeadwayError):
        _receive(wrong)
    sender.close()


def test_a_flipped_bit_on_disk_is_found_and_its_tensor_named(paths: RunPaths) -> None:
    update = make_sender(FilesystemWeights(), paths).publish(1, _weights(1).items())
    file = paths.version(1) / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(bytes(data))
    with pytest.raises(HeadwayError, match=r"fingerprint .*; they differ in \w"):
        _receive(update)


@pytest.mark.parametrize("keep", [0, 10, 3000])
def test_a_truncated_file_is_refused(paths: RunPaths, keep: int) -> None:
    update = make_sender(FilesystemWeights(), paths).publish(1, _weights(1).items())
    file = paths.version(1) / "rank_00000.safetensors"
    os.truncate(file, keep)
    with pytest.raises(HeadwayError, match="not whole"):
        _receive(update)


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "manifest.json"])
def test_a_missing_file_is_refused(paths: RunPaths, name: str) -> None:
    update = make_sender(FilesystemWeights(), paths).publish(1, _weights(1).items())
    (paths.version(1) / name).unlink()
    with pytest.raises(HeadwayError):
        _receive(update)


def test_more_versions_are_kept_on_request(paths: RunPaths) -> None:
    sender = make_sender(FilesystemWeights(keep_last=4), paths)
    for version in range(7):
        sender.publish(version, _weights(version).items())
    assert announced(paths) == [3, 4, 5, 6]
    assert sorted(entry.name for entry in paths.weights.iterdir() if entry.is_dir()) == [
        f"v{version:06d}" for version in (3, 4, 5, 6)
    ]


def test_a_broken_announcement_is_named(paths: RunPaths) -> None:
    make_sender(FilesystemWeights(), paths).publish(2, _weights(1).items())
    paths.announcement(2).write_text("{")
    with pytest.raises(HeadwayError, match="not a weight announcement"):
        latest(paths)
    withdraw(paths, 2)
    assert latest(paths) is None


@pytest.mark.parametrize("transport", [{"type": "pigeon"}, {}, {"type": "filesystem"}, {"type": "shared_memory"}])
def test_a_transport_that_cannot_be_is_refused(transport: dict[str, str]) -> None:
    with pytest.raises(HeadwayError):
        _receive(WeightUpdate(1, "0" * 32, transport))


def test_shared_memory_leaves_nothing_behind(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / f"leaves-nothing-{os.getpid()}")
    sender = make_sender(SharedMemoryWeights(), paths)
    for version in range(3):
        sender.publish(version, _weights(version).items())
    prefix = latest(paths).transport["prefix"]  # type: ignore[union-attr]
    folder = host_memory.folder()
    assert len(list(folder.glob(f"{prefix}-*"))) == 4
    sender.close()
    assert not list(folder.glob(f"{prefix}-*"))


def test_a_buffer_that_is_written_over_while_it_is_read_is_refused(paths: RunPaths) -> None:
    sender = make_sender(SharedMemoryWeights(), paths)
    reading = make_receiver().receive(sender.publish(0, _weights(0).items()))
    next(reading)
    for version in (1, 2):
        sender.publish(version, _weights(version).items())
    with pytest.raises(HeadwayError, match=r"no longer in shared memory|fingerprint"):
        list(reading)
    sender.close()


def test_segments_that_were_replaced_by_larger_ones_are_mapped_again(paths: RunPaths) -> None:
    sender, receiver = shared_memory.SharedMemorySender(paths, piece_bytes=4096), make_receiver()
    for version in range(6):
        weights = {"w": torch.full((300 * 4**version,), float(version))}
        update = sender.publish(version, weights.items())
        assert _same({name: tensor.clone() for name, tensor in receiver.receive(update)}, weights)
    receiver.close()
    sender.close()


def test_a_segment_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / f"cut-short-{os.getpid()}")
    sender, receiver = make_sender(SharedMemoryWeights(), paths), make_receiver()
    update = sender.publish(0, [("w", torch.ones(9))])
    segment = host_memory.segment_path(update.transport["prefix"], 0, 0, 0)
    whole = segment.read_bytes()
    segment.unlink()
    segment.write_bytes(whole[:20])
    with pytest.raises(HeadwayError, match="shorter than"):
        list(receiver.receive(update))
    segment.unlink()
    segment.write_bytes(whole)
    assert dict(receiver.receive(update))["w"].tolist() == [1.0] * 9
    sender.close()


def test_full_memory_is_said_to_be_full(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    sender = make_sender(SharedMemoryWeights(), paths)
    with pytest.raises(HeadwayError, match=r"no room for .* \(No space left on device\); enlarge it"):
        sender.publish(0, [("w", torch.ones(9))])
    sender.close()


def test_an_engine_lets_go_of_a_trainer_that_was_followed_by_another(tmp_path: Path) -> None:
    memory = MappedMemory()
    senders = [make_sender(SharedMemoryWeights(), RunPaths(tmp_path / f"{name}-{os.getpid()}")) for name in "ab"]
    for sender in senders:
        list(shared_memory.fetch(sender.publish(0, [("w", torch.ones(9))]), memory)[1])
        assert len(memory._files) == 1
        sender.close()


def _publish_and_die(root: str) -> None:
    make_sender(SharedMemoryWeights(), RunPaths(Path(root))).publish(0, [("w", torch.ones(9))])
    os.kill(os.getpid(), signal.SIGKILL)


def test_segments_of_a_killed_trainer_are_readable_until_the_next_start_sweeps_them(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / f"killed-{os.getpid()}")
    process = multiprocessing.get_context("forkserver").Process(target=_publish_and_die, args=(str(paths.root),))
    process.start()
    process.join()
    update = latest(paths)
    assert update is not None
    assert _receive(update)["w"].tolist() == [1.0] * 9
    leftovers = list(host_memory.folder().glob(f"{update.transport['prefix']}-*"))
    assert leftovers
    sender = make_sender(SharedMemoryWeights(), paths)
    assert not any(path.exists() for path in leftovers)
    sender.close()


@pytest.fixture
def sender(paths: RunPaths) -> Iterator[PointToPointSender]:
    sender = PointToPointSender(PointToPointWeights(), paths, piece_bytes=4096)
    yield sender
    sender.close()


def test_several_engines_fetch_at_once(sender: PointToPointSender) -> None:
    update = sender.publish(1, _weights(1).items())
    got: list[bool] = []
    engines = [threading.Thread(target=lambda: got.append(_same(_receive(update), _weights(1)))) for _ in range(4)]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join()
    assert got == [True] * 4


def _take_one_and_die(update: bytes) -> None:
    decoded = json.loads(update)
    next(make_receiver().receive(WeightUpdate(**decoded)))
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_engine_that_dies_halfway_disturbs_nobody(sender: PointToPointSender) -> None:
    update = sender.publish(1, [("big", torch.ones(40_000)), *_weights(1).items()])
    body = json.dumps({"version": 1, "fingerprint": update.fingerprint, "transport": update.transport}).encode()
    engine = multiprocessing.get_context("forkserver").Process(target=_take_one_and_die, args=(body,))
    engine.start()
    engine.join()
    assert engine.exitcode == -signal.SIGKILL
    for version in range(2, 6):
        assert _same(_receive(sender.publish(version, _weights(version).items())), _weights(version))


def test_a_reader_of_an_old_version_is_not_disturbed_by_new_ones(sender: PointToPointSender) -> None:
    reading = make_receiver().receive(sender.publish(1, _weights(1).items()))
    received = [next(reading)]
    for version in range(2, 5):
        sender.publish(version, _weights(version).items())
    received += list(reading)
    assert _same(dict(received), _weights(1))


def test_two_gpus_are_connected_by_nccl_and_everything_else_by_gloo() -> None:
    assert process_pairs.pair_backend("GPU-1", "GPU-2") == "nccl"
    pairs = [("GPU-1", "GPU-1"), ("GPU-1", ""), ("", "GPU-1"), ("", "")]
    assert {process_pairs.pair_backend(*two) for two in pairs} == {"gloo"}


def test_tensors_that_straddle_chunks_arrive_in_their_places(
    sender: PointToPointSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.transport.weights.relays.pieces.CHUNK_BYTES", 1024)
    weights = _weights(1) | {"long": torch.randn(3000, generator=torch.Generator().manual_seed(3))}
    places = {name: torch.zeros_like(tensor).contiguous() for name, tensor in weights.items()}
    receiver = make_receiver()
    for version in (1, 2):
        received = dict(receiver.receive(sender.publish(version, weights.items()), places))
        assert _same(received, weights) and _same(places, weights)
    assert received["long"].data_ptr() == places["long"].data_ptr()
    assert _same(dict(receiver.receive(sender.publish(3, weights.items()))), weights)


def test_fetching_from_a_trainer_that_is_gone_fails_in_bounded_time(paths: RunPaths) -> None:
    sender = PointToPointSender(PointToPointWeights(), paths)
    update = sender.publish(1, _weights(1).items())
    sender.close()
    with pytest.raises(HeadwayError, match="could not be fetched"):
        _receive(update)
