"""Reading of checkpoints that someone else may have written: nothing in them is ever executed.

Torch keeps the index of a distributed checkpoint as a pickle, which can name any function to be called. Here only the
classes that such an index consists of are allowed.
"""

import io
import pickle
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath", "WindowsPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath", "WindowsPath"),
    "collections": ("OrderedDict",),
}


class SafeReader(FileSystemReader):
    """Reads a checkpoint of tensors. Raises `pickle.UnpicklingError` on an index that holds anything else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        _check(metadata)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata  # type: ignore[no-any-return]  # checked above


def files_to_read(folder: Path, tensors: dict[str, Tensor]) -> set[str]:
    """Return the names of the files that hold this rank's parts of the tensors, which may have been written by other
    ranks, and by fewer or more of them."""
    metadata = SafeReader(folder).read_metadata()
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=False)
    indexes = [item.storage_index for item in planner.create_local_plan().items]
    return {str(metadata.storage_data[index].relative_path) for index in indexes if metadata.storage_data}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"its index names {module}.{name}, which no checkpoint of tensors does")
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Enum:
    """Return a member of an enumeration, which the first releases of Python 3.11 write as an attribute."""
    if not (isinstance(kind, EnumMeta) and isinstance(name, str) and name in kind.__members__):
        raise pickle.UnpicklingError(f"its index asks for {name!r} of something, which no checkpoint of tensors does")
    return kind[name]


def _check(metadata: Any) -> None:
    """Refuse entries other than tensors, which torch would unpickle, and files outside the folder."""
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError("its index is none")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise pickle.UnpicklingError(f"its entry {name!r} is not a tensor")
    for info in (metadata.storage_data or {}).values():
        if Path(info.relative_path).name != str(info.relative_path):
            raise pickle.UnpicklingError(f"its index points to {info.relative_path}, outside its folder")
