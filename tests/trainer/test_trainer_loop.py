"""The whole loop on one rank, over the filesystem: what it leaves behind, resuming, and bad input."""

import json
import math
import os
import pickle
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from trainer_helpers import checkpoint_tensors, rich_batch, run_paths, small_settings, spool, vocab_of

from headway.base.errors import DamagedError, HeadwayError, UsageError
from headway.cli import export as export_command
from headway.config.loader import write_settings
from headway.config.shared import FilesystemRollouts
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.core.wire import decode
from headway.models.checkpoints.folders import load_model
from headway.models.tiny import resolve_model
from headway.monitor.metrics import read_metrics
from headway.trainer.rl import train
from headway.transport.announcements import announced, latest, read
from headway.transport.rollouts import RankBatch, make_sender
from headway.transport.weights import make_receiver

QUICK = {"trainer__optim__lr": 1e-3}


def published(paths: RunPaths, version: int) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in make_receiver().receive(read(paths, version))}


def test_a_run_publishes_every_version_and_leaves_checkpoint_export_and_metrics(tmp_path: Path) -> None:
    paths = run_paths(tmp_path)
    spool(paths, range(1, 4))
    train(small_settings(max_steps=3, trainer__checkpoints__interval=2, weights__keep_last=9, **QUICK), paths)

    assert announced(paths) == [0, 1, 2, 3]
    initial = dict(published(paths, 0))
    for name, tensor in initial.items():
        assert torch.equal(tensor, dict(_hf("tiny"))[name])
    assert paths.complete_checkpoints() == [2, 3]
    exported = load_model(paths.exports / "step_000003")
    for name, tensor in published(paths, 3).items():
        assert torch.equal(tensor, dict(exported.named_parameters())[name])
        assert not torch.equal(tensor, initial[name])
    assert (paths.exports / "step_000003" / "tokenizer.json").is_file()

    lines = list(read_metrics(paths.metrics / "trainer.jsonl"))
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["tokens"] == sum(sum(micro) for micro in ([9, 17, 4], [24, 5], [30], [3, 3, 12, 8]))
        assert line["mismatch_kl"] > 0 and 0 < line["entropy"] < math.log(vocab_of("tiny"))
        for name in ("loss", "loss/rl", "loss/ce", "loss/ref_kl", "grad_norm", "lr", "tokens_per_second"):
            assert math.isfinite(line[name])
        for name in ("wait_seconds", "step_seconds", "publish_seconds", "publish_bytes", "peak_memory_gib"):
            assert line[name] >= 0


@pytest.mark.parametrize(
    ("gpus", "flags", "dtype"),
    [
        ([], [], torch.float32),
        (["NVIDIA H200"], [], torch.bfloat16),
        (["NVIDIA H200"], ["--dtype", "float32"], torch.float32),
    ],
)
def test_an_export_has_the_precision_in_which_the_run_computed(
    tmp_path: Path, one_step: RunPaths, gpus: list[str], flags: list[str], dtype: torch.dtype
) -> None:
    from transformers import AutoModelForCausalLM

    one_step.record.write_text(json.dumps({"attempts": [{"gpus": gpus}]}))
    out = tmp_path / "out"
    assert export_command.run([str(one_step.root), str(out), *flags]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    own = dict(load_model(one_step.exports / "step_000001").named_parameters())
    for name, tensor in load_model(out).named_parameters():
        assert torch.equal(tensor, own[name].to(dtype).float())


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run of one step that trained wherever there was a GPU, or else on the CPU: here."""
    paths = run_paths(tmp_path_factory.mktemp("run"))
    spool(paths, [1])
    settings = small_settings(max_steps=1, placement__device="auto", **QUICK)
    train(small_settings(max_steps=1, **QUICK), paths)
    write_settings(settings, paths.config / "trainer.toml")
    return paths


def _hf(model: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach()) for name, p in load_model(resolve_model(model)).named_parameters()]


def test_batches_stay_in_the_spool_until_the_orchestrator_prunes_them(tmp_path: Path) -> None:
    paths = run_paths(tmp_path)
    spool(paths, range(1, 6))
    train(small_settings(max_steps=4, trainer__checkpoints__interval=2, **QUICK), paths)
    assert [int(folder.name[5:]) for folder in sorted(paths.batches.glob("step_*"))] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow), pytest.param("sgd", marks=pytest.mark.slow)]
)
def test_resuming_is_bit_exact(tmp_path: Path, optimizer: str) -> None:
    extra = {"trainer__optim__type": optimizer, "trainer__optim__lr": 1e-3, "trainer__checkpoints__interval": 10}
    if optimizer == "sgd":
        extra["trainer__optim__momentum"] = 0.9
    straight, broken = run_paths(tmp_path / "straight"), run_paths(tmp_path / "broken")
    for paths in (straight, broken):
        spool(paths, range(1, 21))
    train(small_settings(max_steps=20, **extra), straight)
    train(small_settings(max_steps=10, **extra), broken)
    train(small_settings(max_steps=20, **extra), broken)

    want, got = checkpoint_tensors(straight, 20), checkpoint_tensors(broken, 20)
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert torch.equal(tensor, got[name]), name
    a, b = latest(straight), latest(broken)
    assert a is not None and b is not None and (a.version, a.fingerprint) == (b.version, b.fingerprint)
    steps = [line["step"] for line in read_metrics(broken.metrics / "trainer.jsonl")]
    assert steps == list(range(1, 21))


def test_a_run_killed_after_publishing_goes_back_to_its_checkpoint_and_replays(tmp_path: Path) -> None:
    """The trainer was at step 5 but its last checkpoint is of step 2: version 2 is announced again."""
    paths = run_paths(tmp_path)
    spool(paths, range(1, 6))
    train(small_settings(max_steps=2, trainer__checkpoints__interval=2, **QUICK), paths)
    settings = small_settings(
        max_steps=5, trainer__checkpoints__interval=100, trainer__checkpoints__keep_last=9, **QUICK
    )
    train(settings, paths)
    first = latest(paths)
    (paths.checkpoint(5) / "COMPLETE").unlink()
    train(settings, paths)
    again = latest(paths)
    assert first is not None and again is not None and first.fingerprint == again.fingerprint
    assert [line["step"] for line in read_metrics(paths.metrics / "trainer.jsonl")] == [1, 2, 3, 4, 5]


def test_a_half_written_checkpoint_is_ignored_and_removed(tmp_path: Path) -> None:
    paths = run_paths(tmp_path)
    spool(paths, range(1, 4))
    train(small_settings(max_steps=2, trainer__checkpoints__interval=1, **QUICK), paths)
    half = paths.checkpoint(7) / "trainer"
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(b"half")
    train(small_settings(max_steps=3, **QUICK), paths)
    assert paths.complete_checkpoints()[-1] == 3 and not half.exists()


class Exploit:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def damage(folder: Path, kind: str, mark: Path) -> None:
    tensors, index = folder / "trainer" / "__0_0.distcp", folder / "trainer" / ".metadata"
    match kind:
        case "gone":
            tensors.unlink()
        case "cut":
            tensors.write_bytes(tensors.read_bytes()[:1000])
        case "flipped":
            data = bytearray(tensors.read_bytes())
            data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
            data[len(data) // 2 + 64 : len(data) // 2 + 128] = b"\xff" * 64
            tensors.write_bytes(data)
        case "marker":
            (folder / "COMPLETE").write_bytes(b"{")
        case "index":
            index.write_bytes(index.read_bytes()[:50])
        case "exploit":
            index.write_bytes(pickle.dumps(Exploit(mark)))
        case "hidden exploit":
            metadata = pickle.loads(index.read_bytes())
            metadata.planner_data = Exploit(mark)
            index.write_bytes(pickle.dumps(metadata))
        case "bytes":
            metadata = pickle.loads(index.read_bytes())
            name = next(iter(metadata.state_dict_metadata))
            metadata.state_dict_metadata[name] = BytesStorageMetadata()
            index.write_bytes(pickle.dumps(metadata))


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run at step 4 with checkpoints of 2 and 4, and batches for 6."""
    paths = run_paths(tmp_path_factory.mktemp("run"))
    spool(paths, range(1, 7))  # once: nobody sends an old batch again
    train(small_settings(max_steps=4, trainer__checkpoints__interval=2, **QUICK), paths)
    return paths


@pytest.mark.parametrize("kind", ["gone", "cut", "flipped", "marker", "index", "exploit", "hidden exploit", "bytes"])
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before_it(
    tmp_path: Path, kind: str, two_checkpoints: RunPaths, caplog: pytest.LogCaptureFixture
) -> None:
    paths = RunPaths(shutil.copytree(two_checkpoints.root, tmp_path / "run"))
    damage(paths.checkpoint(4), kind, tmp_path / "executed")
    train(small_settings(max_steps=6, **QUICK), paths)
    assert not (tmp_path / "executed").exists(), "the checkpoint ran code"
    assert paths.complete_checkpoints() == [2, 6] and (paths.checkpoints / "damaged_step_000004").is_dir()
    assert [line["step"] for line in read_metrics(paths.metrics / "trainer.jsonl")] == [1, 2, 3, 4, 5, 6]
    said = [record.message for record in caplog.records if record.name.startswith("headway.trainer.checkpoints")]
    assert len(said) == 1 and "continues from step 2" in said[0] and "()" not in said[0]


def test_the_only_checkpoint_is_not_given_up(tmp_path: Path) -> None:
    paths = run_paths(tmp_path)
    spool(paths, range(1, 4))
    train(small_settings(max_steps=2, trainer__checkpoints__interval=2, **QUICK), paths)
    damage(paths.checkpoint(2), "cut", tmp_path / "executed")
    with pytest.raises(DamagedError, match=r"000002 is damaged \(\w.*the only checkpoint.*remove .*000002 to train"):
        train(small_settings(max_steps=3, **QUICK), paths)
    assert paths.complete_checkpoints() == [2]
    shutil.rmtree(paths.checkpoint(2))  # as the message says
    assert train(small_settings(max_steps=3, **QUICK), paths)
    assert [line["step"] for line in read_metrics(paths.metrics / "trainer.jsonl")] == [1, 2, 3]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    paths = run_paths(tmp_path)
    spool(paths, range(1, 3))
    train(small_settings(max_steps=1, **QUICK), paths)
    with pytest.raises(UsageError, match=r"another configuration \(model .* instead of"):
        train(small_settings(max_steps=2, model__path="tiny-llama", **QUICK), paths)
    with pytest.raises(HeadwayError, match="optimizer adamw instead of muon"):
        train(small_settings(max_steps=2, trainer__optim__type="muon"), paths)


def test_checkpoints_are_kept_by_number_and_interval(tmp_path: Path) -> None:
    paths = run_paths(tmp_path)
    spool(paths, range(1, 8))
    keep = {"interval": 1, "keep_last": 2, "keep_interval": 3, "export_interval": 4}
    train(small_settings(max_steps=7, trainer__checkpoints=keep, **QUICK), paths)
    assert paths.complete_checkpoints() == [3, 6, 7]
    assert sorted(folder.name for folder in paths.exports.iterdir()) == ["step_000004", "step_000007"]


def spool_poisoned(paths: RunPaths, steps: range, poisoned: set[int]) -> None:
    sender = make_sender(FilesystemRollouts(), paths)
    for step in steps:
        batch = rich_batch(step, 1, vocab_of("tiny"))
        if step in poisoned:
            micro = batch.ranks[0][0]
            micro.advantages = np.where(micro.sampled, np.inf, 0).astype(np.float32)
        sender.send(batch, b"{}")


def test_a_step_that_is_not_finite_is_skipped_and_its_version_published_unchanged(tmp_path: Path) -> None:
    paths = run_paths(tmp_path)
    spool_poisoned(paths, range(1, 4), {2})
    train(small_settings(max_steps=3, weights__keep_last=9, **QUICK), paths)
    assert read(paths, 2).fingerprint == read(paths, 1).fingerprint != read(paths, 3).fingerprint
    lines = list(read_metrics(paths.metrics / "trainer.jsonl"))
    assert [line["skipped"] for line in lines] == [0, 1, 0]
    assert lines[1]["grad_norm"] is None


def test_too_many_bad_steps_in_a_row_stop_the_run_and_keep_the_batch(tmp_path: Path) -> None:
    paths = run_paths(tmp_path)
    spool_poisoned(paths, range(1, 6), {1, 3, 4})
    with pytest.raises(HeadwayError, match="2 steps in a row were not finite, the last at step 4"):
        train(small_settings(max_steps=5, trainer__max_bad_steps=2, **QUICK), paths)
    kept = decode(RankBatch, (paths.root / "bad_batches" / "step_000004" / "rank_000.msgpack").read_bytes())
    assert np.isinf(kept.micro_batches[0].advantages).any()


def test_a_batch_whose_streams_disagree_names_the_stream(tmp_path: Path) -> None:
    paths = run_paths(tmp_path)
    batch = rich_batch(1, 1, vocab_of("tiny"))
    batch.ranks[0][1].advantages = batch.ranks[0][1].advantages[:-1]
    make_sender(FilesystemRollouts(), paths).send(batch, b"{}")
    with pytest.raises(HeadwayError, match="advantages has shape"):
        train(small_settings(max_steps=1), paths)


def test_a_stop_file_ends_the_run_with_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headway.trainer.feed")
    paths = run_paths(tmp_path)
    spool(paths, range(1, 3))
    train(small_settings(max_steps=2, **QUICK), paths)
    (paths.control / "stop").touch()
    train(small_settings(max_steps=9, **QUICK), paths)
    assert paths.complete_checkpoints() == [2] and not (paths.exports / "step_000009").exists()
    assert f"(run folder: {paths.root})" in caplog.text, "who waits says where"


def test_weights_that_someone_removed_are_published_again(tmp_path: Path) -> None:
    paths, seen = run_paths(tmp_path), []

    def remove_weights_then_send() -> None:
        first = _wait_for_announcement(paths)
        shutil.rmtree(paths.weights)
        again = _wait_for_announcement(paths)
        seen.append(first == again and set(published(paths, 0)) == set(dict(_hf("tiny"))))
        spool(paths, [1])

    sender = threading.Thread(target=remove_weights_then_send)
    sender.start()
    assert train(small_settings(max_steps=1, **QUICK), paths)
    sender.join()
    assert seen == [True]


def _wait_for_announcement(paths: RunPaths) -> WeightUpdate:
    while (update := latest(paths)) is None:
        time.sleep(0.01)
    return update
