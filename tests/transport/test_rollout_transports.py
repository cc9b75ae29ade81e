"""Batches reach every rank whole, over both transports, through restarts of either side."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from headway.base.errors import DamagedError, HeadwayError
from headway.config.shared import FilesystemRollouts, RolloutTransport, ZmqRollouts
from headway.core.batches import Batch, ComponentCounts, MicroBatch
from headway.core.runs import RunPaths
from headway.core.samples import BranchKey
from headway.core.streams import streams_of
from headway.transport.rollouts import make_receiver, make_sender
from headway.transport.rollouts.filesystem import read_part

TRANSPORTS = [FilesystemRollouts(), ZmqRollouts()]
both = pytest.mark.parametrize("transport", TRANSPORTS, ids=["filesystem", "zmq"])


def micro_batch(seed: int, tokens: int = 6) -> MicroBatch:
    """Random numbers in every stream."""
    rng = np.random.default_rng(seed)
    micro = MicroBatch.blank([2, tokens - 2])
    for stream in streams_of(MicroBatch).values():
        setattr(micro, stream.name, (9 * rng.normal(size=tokens)).astype(stream.dtype))
    micro.keys = [BranchKey(f"{seed}.0", 1, 3), BranchKey(f"{seed}.1", 0, 4)]
    micro.routed_experts = rng.integers(0, 8, (tokens, 2, 2)).astype(np.int16)
    return micro


def batch_of(step: int, ranks: int = 2) -> Batch:
    return Batch(step, [[micro_batch(10 * step + r)] for r in range(ranks)], ComponentCounts(rl=4), metrics={"x": 1.0})


def assert_same(got: MicroBatch, want: MicroBatch) -> None:
    assert got.keys == want.keys
    for name in (*streams_of(MicroBatch), "lengths", "routed_experts"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)


@both
def test_every_rank_gets_its_part(tmp_path: Path, transport: RolloutTransport) -> None:
    paths = RunPaths(tmp_path)
    sender = make_sender(transport, paths)
    batch = batch_of(1)
    sender.send(batch, b'{"cursor": 7}')
    for rank in range(2):
        receiver = make_receiver(transport, paths, rank, 2)
        part = receiver.receive(1, timeout=120)
        assert part is not None and part.step == 1 and part.counts == ComponentCounts(rl=4) and part.metrics == {"x": 1}
        assert_same(part.micro_batches[0], batch.ranks[rank][0])
        assert part.micro_batches[0].token_ids.flags.writeable
        receiver.close()
    assert sender.last_step() == 1 and next(sender.load_states()) == (1, b'{"cursor": 7}')
    sender.close()


@both
def test_a_receiver_waits_for_a_batch_and_gives_up_at_its_timeout(tmp_path: Path, transport: RolloutTransport) -> None:
    paths = RunPaths(tmp_path)
    sender = make_sender(transport, paths)
    receiver = make_receiver(transport, paths, 0, 1)
    assert receiver.receive(1, timeout=0.05) is None
    timer = threading.Timer(0.2, lambda: sender.send(batch_of(1, ranks=1), b"{}"))
    timer.start()
    part = receiver.receive(1, timeout=30)
    timer.join()
    assert part is not None and part.step == 1
    receiver.close()
    sender.close()


@both
def test_batches_outlive_the_sender_and_can_be_replayed(tmp_path: Path, transport: RolloutTransport) -> None:
    paths = RunPaths(tmp_path)
    first = make_sender(transport, paths)
    receiver = make_receiver(transport, paths, 0, 2)
    first.send(batch_of(1), b'"one"')
    assert receiver.receive(1, timeout=120) is not None
    first.close()

    second = make_sender(transport, paths)
    assert second.last_step() == 1 and next(second.load_states()) == (1, b'"one"')
    second.send(batch_of(2), b'"two"')
    for step in (2, 1, 2):
        part = receiver.receive(step, timeout=30)
        assert part is not None and part.step == step
    receiver.close()
    second.close()


@both
def test_a_trainer_of_another_size_is_refused(tmp_path: Path, transport: RolloutTransport) -> None:
    paths = RunPaths(tmp_path)
    sender = make_sender(transport, paths)
    sender.send(batch_of(1, ranks=2), b"{}")
    receiver = make_receiver(transport, paths, 0, 3)
    with pytest.raises(HeadwayError, match="packed for 2 data ranks, but the trainer has 3"):
        receiver.receive(1, timeout=120)
    receiver.close()
    sender.close()


def test_prune_keeps_the_newest_batch_and_what_no_checkpoint_covers(tmp_path: Path) -> None:
    sender = make_sender(FilesystemRollouts(), RunPaths(tmp_path))
    for step in (1, 2, 3):
        sender.send(batch_of(step), b"{}")
    sender.prune(1)
    assert sorted(p.name for p in (tmp_path / "batches").iterdir()) == ["step_000002", "step_000003"]
    sender.prune(9)
    assert [p.name for p in (tmp_path / "batches").iterdir()] == ["step_000003"]
    assert sender.last_step() == 3


def test_a_half_written_batch_is_invisible(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    (paths.batches / ".step_000001.abc.tmp").mkdir(parents=True)
    sender = make_sender(FilesystemRollouts(), paths)
    assert sender.last_step() == 0 and list(sender.load_states()) == []
    assert make_receiver(FilesystemRollouts(), paths, 0, 1).receive(1, timeout=0) is None


def test_a_broken_batch_names_its_file(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.batch(1).mkdir(parents=True)
    (paths.batch(1) / "rank_000_of_001.msgpack").write_bytes(b"\x93garbage")
    with pytest.raises(DamagedError, match=r"step_000001: the batch is damaged.*continue with --resume"):
        make_receiver(FilesystemRollouts(), paths, 0, 1).receive(1, timeout=0)


def test_a_stranger_cannot_stop_the_zmq_server(tmp_path: Path) -> None:
    import zmq

    paths = RunPaths(tmp_path)
    sender = make_sender(ZmqRollouts(), paths)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect((paths.control / "rollouts.address").read_text())
        socket.send(b"\x80\x04not a question")
        socket.send_multipart([b"", b""])
        sender.send(batch_of(1, ranks=1), b"{}")
        receiver = make_receiver(ZmqRollouts(), paths, 0, 1)
        assert receiver.receive(1, timeout=30) is not None
        receiver.close()
    sender.close()


def test_a_batch_that_appears_while_one_looks_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look finds no file, the second finds the folder: it came in between, whole."""
    paths = RunPaths(tmp_path)
    is_dir = Path.is_dir

    def appears(path: Path) -> bool:
        if path == paths.batch(1) and not is_dir(path):
            monkeypatch.undo()
            make_sender(FilesystemRollouts(), paths).send(batch_of(1, 1), b"{}")
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", appears)
    assert read_part(paths, 1, 0, 1) is not None


def test_batches_that_follow_lost_steps_are_collected_again(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    sender = make_sender(FilesystemRollouts(), paths)
    for step in (6, 7, 8):
        sender.send(batch_of(step, 1), b"{}")
    assert sender.drop_unreachable(5) == [] and sender.drop_unreachable(8) == []
    assert sender.drop_unreachable(3) == [6, 7, 8] and paths.spooled_batches() == []


def test_a_damaged_batch_and_those_after_it_are_collected_again(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    sender = make_sender(FilesystemRollouts(), paths)
    for step in range(1, 6):
        sender.send(batch_of(step, 1), b"{}")
    (part,) = paths.batch(4).glob("rank_*.msgpack")
    os.truncate(part, part.stat().st_size // 2)
    assert sender.drop_unreachable(2) == [4, 5]
    assert sender.last_step() == 3
