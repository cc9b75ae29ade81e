"""Copies of checkpoints elsewhere: a trainer that lost its disk continues from the newest whole one."""

import shutil
import uuid
from pathlib import Path

import fsspec
import pytest
from trainer_helpers import checkpoint_tensors, small_settings

from headway.base.errors import PermanentError
from headway.base.storage import MANIFEST, Storage
from headway.config.shared import RunSettings
from headway.config.trainer import TrainSettings
from headway.core.runs import RunPaths
from headway.monitor.runs import create_run, join_elsewhere
from headway.trainer.rl import train


def settings_with(remote: str, steps: int) -> TrainSettings:
    keep = {"interval": 1, "keep_last": 2, "remote": remote}
    return small_settings(max_steps=steps, trainer__checkpoints=keep, trainer__fake_data={"micro_batches": 1})


@pytest.fixture
def remote() -> str:
    return f"memory://{uuid.uuid4().hex}"


def lost_and_joined_again(folder: Path, paths: RunPaths, run_id: str) -> RunPaths:
    shutil.rmtree(paths.root)
    return join_elsewhere(RunSettings(name="run.trainer", output_dir=folder), "train", run_id)


def test_a_trainer_that_lost_its_disk_continues_from_the_newest_whole_copy(tmp_path: Path, remote: str) -> None:
    here = RunSettings(name="run.trainer", output_dir=tmp_path)
    paths = join_elsewhere(here, "train", "the id of the run")
    train(settings_with(remote, 3), paths)
    storage = Storage(remote)
    assert storage.names("checkpoints") == ["step_000002", "step_000003"], "as many as here"
    assert storage.names("exports") == ["step_000003"]
    want = checkpoint_tensors(paths, 3)

    paths = lost_and_joined_again(tmp_path, paths, "the id of the run")
    train(settings_with(remote, 3), paths)  # nothing is left to train
    assert paths.complete_checkpoints() == [3]
    got = checkpoint_tensors(paths, 3)
    assert all(got[name].equal(tensor) for name, tensor in want.items()) and got.keys() == want.keys()

    files, root = fsspec.core.url_to_fs(remote)
    weights = next(path for path in files.find(f"{root}/checkpoints/step_000003") if path.endswith(".distcp"))
    files.pipe_file(weights, files.cat_file(weights)[:-1])
    files.pipe_file(f"{root}/checkpoints/step_000009/trainer/.metadata", b"the upload of this one was cut off")
    paths = lost_and_joined_again(tmp_path, paths, "the id of the run")
    train(settings_with(remote, 2), paths)
    assert paths.complete_checkpoints() == [2], "the newest is damaged, and a later one has no manifest"
    train(settings_with(remote, 4), paths)
    assert paths.complete_checkpoints() == [3, 4]
    assert storage.names("checkpoints") == ["step_000003", "step_000004"]
    assert not files.exists(f"{root}/checkpoints/step_000009/{MANIFEST}")


def test_storage_belongs_to_one_run(tmp_path: Path, remote: str) -> None:
    train(settings_with(remote, 1), create_run(RunSettings(name="a", output_dir=tmp_path), "train"))
    with pytest.raises(PermanentError, match="holds another run"):
        train(settings_with(remote, 1), create_run(RunSettings(name="b", output_dir=tmp_path), "train"))


def test_a_storage_that_fails_costs_copies_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = create_run(RunSettings(name="run", output_dir=tmp_path), "train")
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "checkpoints").write_text("in the way")
    train(settings_with(f"file://{tmp_path}/storage", 2), paths)
    assert paths.complete_checkpoints() == [1, 2]
    assert "checkpoints/step_000002 was not copied" in caplog.text
    assert Storage(f"{tmp_path}/storage").names("exports") == ["step_000002"]
