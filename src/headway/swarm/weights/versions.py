"""Versions of a run as folders: whatever transport the trainer uses, strangers fetch them as files."""

import json
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from headway.base.errors import HeadwayError
from headway.base.files import atomic_directory
from headway.config.shared import LoraSettings
from headway.core.protocol import WeightUpdate
from headway.models.adapters.lora import bank_of, load_adapter
from headway.models.adapters.peft import adapter_settings
from headway.models.checkpoints.folders import INDEX, copy_companions, load_model, read_tensors
from headway.models.decoder import DecoderLM
from headway.swarm.messages.orders import Precision
from headway.swarm.weights.manifest import ADAPTER, AdapterTerms
from headway.swarm.weights.shards import fitting_shard, is_small
from headway.transport.weights.filesystem import MANIFEST, Manifest, file_of, write_shards
from headway.transport.weights.layout import Layout
from headway.transport.weights.receive import WeightReceiver
from headway.transport.weights.shards import Shard

MODELS_KEPT = 4
"""Trusted models in memory: every contribution needs one. Most are of the newest version or the one before, in both
precisions."""


class VersionFolders:
    """Folders of versions, each a checkpoint that `headway serve` loads and an update that a running engine takes.

    `base` is the folder of the run's model: its config and tokenizer go with every version. Where the run trains an
    adapter by `lora`, all versions share the files of the base, and have the adapter in a folder of its own.
    """

    def __init__(self, folder: Path, base: Path, lora: LoraSettings | None = None) -> None:
        self._folder, self._base, self._lora = folder, base, lora
        self._receiver = WeightReceiver()
        self._models: OrderedDict[tuple[str, Precision], DecoderLM] = OrderedDict()
        self._lock = threading.Lock()

    def path(self, version: int) -> Path:
        return self._folder / f"v{version:06d}"

    def fetch(self, update: WeightUpdate) -> Path:
        """Receive a version of the trainer and write its folder. Raises HeadwayError."""
        if (update.adapter is None) != (self._lora is None):
            raise HeadwayError("the trainer and the swarm service disagree on model.lora; start both with one config")
        tensors = {name: tensor.clone() for name, tensor in self._receiver.receive(update)}
        with atomic_directory(self.path(update.version)) as aside:
            if self._lora is None:
                written = write_version(aside, self._base, update.version, tensors)
            else:
                _link_files(self._base_folder(), aside)
                (aside / ADAPTER).mkdir()
                written = write_tensors(aside / ADAPTER, update.version, tensors)
            if written != update.fingerprint:
                raise HeadwayError(f"version {update.version} was written with fingerprint {written}")
        return self.path(update.version)

    def adapter_terms(self) -> AdapterTerms | None:
        """Describe what all versions' adapters have in common; None where versions are whole models."""
        if self._lora is None:
            return None
        manifest = msgspec.json.decode((self._base_folder() / MANIFEST).read_bytes(), type=Manifest)
        return AdapterTerms(manifest.layout.fingerprint, self._lora.rank, self._lora.alpha)

    def _base_folder(self) -> Path:
        """Return the folder of the base model as strangers fetch it, which is written once."""
        folder = self._folder / "base"
        if not folder.is_dir():
            with atomic_directory(folder) as aside:
                write_version(aside, self._base, 0, dict(read_tensors(self._base)))
        return folder

    def model(self, version: int, precision: Precision) -> DecoderLM:
        """Return the trusted model of a version. Raises HeadwayError where its folder is gone."""
        # The layout's file names the fingerprint: a version may come again, with other weights, after a checkpoint.
        with self._lock:
            folder = self.path(version)
            key = ((_trained(folder) / MANIFEST).read_text(), precision)
            if key not in self._models:
                model = load_model(folder, dtype=getattr(torch, precision)).eval()
                if self._lora is not None:
                    add_adapter(model, folder / ADAPTER, self._lora)
                self._models[key] = model
            self._models.move_to_end(key)
            while len(self._models) > MODELS_KEPT:
                self._models.popitem(last=False)
            return self._models[key]

    def remove_before(self, oldest: int) -> None:
        """Remove the folders of versions before `oldest`."""
        for path in self._folder.glob("v*"):
            if int(path.name[1:]) < oldest:
                shutil.rmtree(path, ignore_errors=True)


def _trained(folder: Path) -> Path:
    """Return the folder with the tensors of a version that change: those of its adapter, or all."""
    return folder / ADAPTER if (folder / ADAPTER).is_dir() else folder


def _link_files(source: Path, target: Path) -> None:
    for path in source.iterdir():
        try:
            os.link(path, target / path.name)
        except OSError:  # a disk without links
            shutil.copyfile(path, target / path.name)


def add_adapter(model: DecoderLM, folder: Path, lora: LoraSettings) -> None:
    """Add the adapter in a folder to a model, apart from its weights: rounded into them, it would be another one."""
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    update = update_of(folder, manifest.version, manifest.layout.fingerprint)
    tensors = dict(WeightReceiver().receive(update))
    load_adapter(model, 0, tensors.items(), adapter_settings(tensors, {}, lora))
    bank_of(model).default = 0


def write_version(folder: Path, base: Path, version: int, tensors: Mapping[str, Tensor]) -> str:
    """Write a version's tensors to `folder`, beside config and tokenizer of `base`. Returns their fingerprint."""
    shutil.copyfile(base / "config.json", folder / "config.json")
    copy_companions(base, folder)
    return write_tensors(folder, version, tensors)


def write_tensors(folder: Path, version: int, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to `folder`, small ones to a file of their own, so that large ones lie side by side and are cut
    into few shards. Returns their fingerprint."""
    shards = [Shard(name, tensor, 0, tuple(tensor.shape)) for name, tensor in tensors.items()]
    shard_bytes = fitting_shard(sum(shard.nbytes for shard in shards))
    files: tuple[list[Shard], list[Shard]] = ([], [])
    for shard in shards:
        files[is_small(shard.nbytes, shard_bytes)].append(shard)
    layout = Layout.of([write_shards(folder, number, of) for number, of in enumerate(files)])
    (folder / MANIFEST).write_bytes(msgspec.json.encode(Manifest(version, layout)))
    places = {shard.name: file_of(number) for number, of in enumerate(files) for shard in of}
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(sorted(places.items()))}))
    return layout.fingerprint


def update_of(folder: Path, version: int, fingerprint: str) -> WeightUpdate:
    """Return the update by which a running engine takes the tensors in a folder, and verifies them."""
    return WeightUpdate(
        version=version,
        fingerprint=fingerprint,
        policy="policy",
        transport={"type": "filesystem", "path": str(folder.absolute())},
    )


def adapter_update_of(folder: Path, version: int, fingerprint: str, terms: AdapterTerms) -> WeightUpdate:
    """Return the update by which a running engine takes the adapter of a version's folder."""
    update = update_of(folder / ADAPTER, version, fingerprint)
    return msgspec.structs.replace(update, adapter="policy", transport={**update.transport, "alpha": terms.alpha})


def verify_tensors(folder: Path, fingerprint: str) -> None:
    """Read all tensors in a folder. Raises HeadwayError where they do not have this fingerprint."""
    for _ in WeightReceiver().receive(update_of(folder, 0, fingerprint)):
        pass
