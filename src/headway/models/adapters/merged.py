"""Adapters as models: a PEFT adapter merged into the model that it belongs to, kept in the cache."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from headway.base.cache import cache_folder
from headway.base.errors import UsageError
from headway.models.adapters.files import CONFIG, WEIGHTS


def base_of(folder: Path) -> str | None:
    """Return the name of the model that the adapter in `folder` belongs to; None where `folder` holds no adapter."""
    if (folder / "config.json").is_file() or not (folder / CONFIG).is_file():
        return None
    config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UsageError(f"{folder / CONFIG} does not say which model the adapter belongs to (base_model_name_or_path)")
    return base


def merged_checkpoint(adapter: Path, base: Path) -> Path:
    """Return a checkpoint folder of `base` with the adapter added to its weights, made at its first use."""
    digest = hashlib.sha256(str(base.resolve()).encode())
    for name in (CONFIG, WEIGHTS):
        digest.update((adapter / name).read_bytes())
    folder = cache_folder() / "models" / f"adapter-{digest.hexdigest()[:16]}"
    if not folder.is_dir():
        from headway.models.adapters.lora import load_adapter, merge_adapter
        from headway.models.adapters.peft import read_adapter
        from headway.models.checkpoints.folders import load_model, save_checkpoint

        model = load_model(base)
        settings, tensors = read_adapter(adapter)
        load_adapter(model, 0, tensors.items(), settings)
        merge_adapter(model)
        save_checkpoint(model, folder, files_from=base)
    return folder
