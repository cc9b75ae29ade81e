"""The families that checkpoints can be of: the package's own, and those that a run brings along. Imports no torch."""

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import UsageError
from headway.core.imports import load_object
from headway.models.config import ModelConfig
from headway.models.families.llama import Llama
from headway.models.families.qwen3 import Qwen3
from headway.models.families.qwen3_moe import Qwen3Moe
from headway.models.family import Family

_FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> None:
    """Make checkpoints of `family` known in this process. One of the same model_type is replaced."""
    _FAMILIES[family.model_type] = family


for _family in (Llama(), Qwen3(), Qwen3Moe()):
    register_family(_family)


@cache
def load_family(path: str) -> None:
    """Register the class at `module:name` or `file.py:name`, as `model.family` names it. A second call does nothing."""
    family = load_object(path, "model.family")
    if not isinstance(family, type) or not issubclass(family, Family):
        raise UsageError(f'model.family "{path}" is not a subclass of headway.models.family.Family')
    register_family(family())


def families() -> list[Family]:
    return list(_FAMILIES.values())


def find_family(model_type: str) -> Family:
    """Raises UsageError, with the known ones and how to add one, where there is no such family."""
    if model_type not in _FAMILIES:
        raise UsageError(
            f"unknown model family {model_type!r}; known: {', '.join(sorted(_FAMILIES))}. To add it, subclass "
            'headway.models.family.Family and name the class with model.family = "FILE.py:CLASS" (docs/models.md)'
        )
    return _FAMILIES[model_type]


def load_config(folder: Path | str) -> ModelConfig:
    """Read the config of a checkpoint folder."""
    path = Path(folder) / "config.json"
    try:
        return config_from_hf(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except FileNotFoundError:
        raise UsageError(f"{folder} is no checkpoint folder: it has no config.json") from None
    except (msgspec.DecodeError, UsageError) as error:
        raise UsageError(f"{path}: {error}") from None


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """Read the content of a config.json. Raises UsageError that names what is missing or not supported."""
    if "model_type" not in hf:
        raise UsageError("it lacks 'model_type'")
    return find_family(hf["model_type"]).config_from_hf(hf)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Write the content of a config.json, readable by transformers 4 and 5."""
    return find_family(config.family).config_to_hf(config)
