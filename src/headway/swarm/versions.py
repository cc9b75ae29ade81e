"""Versions of a run as folders: whatever transport the trainer uses, strangers fetch them as files."""

import json
import shutil
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headway.core.errors import HeadwayError
from headway.core.files import atomic_directory
from headway.core.protocol import WeightUpdate
from headway.models.checkpoints.folders import INDEX, copy_companions, load_model
from headway.models.decoder import DecoderLM
from headway.swarm.orders import Precision
from headway.transport.weights.filesystem import MANIFEST, Manifest, file_of, write_shards
from headway.transport.weights.layout import Layout
from headway.transport.weights.receive import WeightReceiver
from headway.transport.weights.shards import Shard

MODELS_KEPT = 2
"""Trusted models in memory: one for the newest version, and one for answers to older orders."""


class VersionFolders:
    """Folders of versions, each a checkpoint that `headway serve` loads and an update that a running engine takes.

    `base` is the folder of the run's model: its config and tokenizer go with every version.
    """

    def __init__(self, folder: Path, base: Path) -> None:
        self._folder, self._base = folder, base
        self._receiver = WeightReceiver()
        self._models: OrderedDict[tuple[str, Precision], DecoderLM] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, version: int) -> Path:
        return self._folder / f"v{version:06d}"

    def fetch(self, update: WeightUpdate) -> Path:
        """Receive a version of the trainer and write its folder. Raises HeadwayError."""
        if update.adapter is not None:
            raise HeadwayError("a swarm samples from whole models; leave model.lora out")
        tensors = {name: tensor.clone() for name, tensor in self._receiver.receive(update)}
        with atomic_directory(self.path(update.version)) as aside:
            written = write_version(aside, self._base, update.version, tensors)
            if written != update.fingerprint:
                raise HeadwayError(f"version {update.version} was written with fingerprint {written}")
        return self.path(update.version)

    def model(self, version: int, precision: Precision) -> DecoderLM:
        """Return the trusted model of a version. Raises HeadwayError where its folder is gone."""
        # The layout's file names the fingerprint: a version may come again, with other weights, after a checkpoint.
        with self._lock:
            key = ((self.path(version) / MANIFEST).read_text(), precision)
            if key not in self._models:
                self._models[key] = load_model(self.path(version), dtype=getattr(torch, precision)).eval()
            self._models.move_to_end(key)
            while len(self._models) > MODELS_KEPT:
                self._models.popitem(last=False)
            return self._models[key]

    def remove_before(self, oldest: int) -> None:
        """Remove the folders of versions before `oldest`."""
        for path in self._folder.glob("v*"):
            if int(path.name[1:]) < oldest:
                shutil.rmtree(path, ignore_errors=True)


def write_version(folder: Path, base: Path, version: int, tensors: Mapping[str, Tensor]) -> str:
    """Write a version's tensors to `folder`, beside config and tokenizer of `base`. Returns their fingerprint."""
    shutil.copyfile(base / "config.json", folder / "config.json")
    copy_companions(base, folder)
    shards = [Shard(name, tensor, 0, tuple(tensor.shape)) for name, tensor in tensors.items()]
    layout = Layout.of([write_shards(folder, 0, shards)])
    (folder / MANIFEST).write_bytes(msgspec.json.encode(Manifest(version, layout)))
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(sorted(tensors), file_of(0))}))
    return layout.fingerprint


def update_of(folder: Path, version: int, fingerprint: str) -> WeightUpdate:
    """Return the update by which a running engine takes the weights in a version's folder, and verifies them."""
    return WeightUpdate(
        version=version,
        fingerprint=fingerprint,
        policy="policy",
        transport={"type": "filesystem", "path": str(folder.absolute())},
    )
