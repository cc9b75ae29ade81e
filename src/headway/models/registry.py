"""The families that checkpoints can be of: the package's own, and those that a run brings along. Imports no torch."""

import logging
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from headway.base.errors import UsageError
from headway.base.imports import load_object
from headway.models.configs.config import ModelConfig
from headway.models.families.afmoe import Afmoe
from headway.models.families.any_transformers import AnyTransformers
from headway.models.families.deepseek_v3 import DeepseekV3
from headway.models.families.deepseek_v32 import DeepseekV32
from headway.models.families.gemma3 import Gemma3Text
from headway.models.families.gemma3_vision import Gemma3
from headway.models.families.glm4_moe import Glm4Moe
from headway.models.families.glm_moe_dsa import GlmMoeDsa
from headway.models.families.gpt_oss import GptOss
from headway.models.families.laguna import Laguna
from headway.models.families.llama import Llama
from headway.models.families.minimax_m2 import MiniMaxM2
from headway.models.families.mistral import Mistral
from headway.models.families.nemotron_h import NemotronH
from headway.models.families.olmo2 import Olmo2
from headway.models.families.olmo3 import Olmo3
from headway.models.families.qwen2 import Qwen2
from headway.models.families.qwen2_5_vl import Qwen25VL
from headway.models.families.qwen3 import Qwen3
from headway.models.families.qwen3_5 import Qwen35MoeText, Qwen35Text
from headway.models.families.qwen3_moe import Qwen3Moe
from headway.models.families.qwen3_next import Qwen3Next
from headway.models.families.qwen3_vl import Qwen3VL, Qwen3VLMoe
from headway.models.family import Family

logger = logging.getLogger(__name__)

Implementation = Literal["headway", "transformers"]
"""Whose code runs a model (`model.implementation`)."""

_FAMILIES: dict[str, Family] = {}
_ANY = AnyTransformers()
"""All models, where Hugging Face's code is asked for. No family of the list: no config.json names it."""


def register_family(family: Family) -> None:
    """Make checkpoints of `family` known in this process. One of the same model_type is replaced."""
    _FAMILIES[family.model_type] = family


_OWN: tuple[type[Family], ...] = (
    *(Llama, Mistral, Qwen2, Qwen3, Qwen3Moe, Gemma3Text, Olmo2, Olmo3),
    *(Glm4Moe, GptOss, MiniMaxM2, Afmoe, Laguna, DeepseekV3, DeepseekV32, GlmMoeDsa),
    *(Qwen3Next, Qwen35Text, Qwen35MoeText, NemotronH),
    *(Qwen25VL, Qwen3VL, Qwen3VLMoe, Gemma3),
)
for _family in _OWN:
    register_family(_family())


@cache
def load_family(path: str) -> None:
    """Register the class at `module:name` or `file.py:name`, as `model.family` names it. A second call does nothing."""
    family = load_object(path, "model.family", "headway.families")
    if not isinstance(family, type) or not issubclass(family, Family):
        raise UsageError(f'model.family "{path}" is not a subclass of headway.models.family.Family')
    register_family(family())


def families() -> list[Family]:
    return list(_FAMILIES.values())


def find_family(model_type: str) -> Family:
    """Raises UsageError, with the known ones and how to add one, where there is no such family."""
    if model_type in _FAMILIES:
        return _FAMILIES[model_type]
    if model_type == _ANY.model_type:
        return _ANY
    for family in _FAMILIES.values():
        if model_type in family.aliases:
            return family
    raise UsageError(
        f"unknown model family {model_type!r}; known: {', '.join(sorted(_FAMILIES))}. To run it by Hugging Face's "
        'own code, set model.implementation = "transformers"; to add it, subclass headway.models.family.Family and '
        'name the class with model.family = "FILE.py:CLASS" (docs/models.md)'
    )


def load_config(folder: Path | str, implementation: Implementation = "headway") -> ModelConfig:
    """Read the config of a checkpoint folder, of a model that `implementation` is to run."""
    path = Path(folder) / "config.json"
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if implementation == "headway":
            return config_from_hf(values)
        config = _ANY.config_from_hf(values)
        _log_losses(values["model_type"])
        return config
    except FileNotFoundError:
        raise UsageError(f"{folder} is no checkpoint folder: it has no config.json") from None
    except (msgspec.DecodeError, UsageError) as error:
        raise UsageError(f"{path}: {error}") from None


@cache
def _log_losses(model_type: str) -> None:
    """Say once in a process what a model loses that Headway's code does not run."""
    logger.warning(
        "%s runs in Hugging Face's own code: without Headway's kernels, CUDA graphs, router replay, selective "
        'recomputation, context and expert parallelism; the embedded engine is slow, inference.engine = "vllm" is not',
        model_type,
    )


def config_from_hf(hf: dict[str, Any]) -> ModelConfig:
    """Read the content of a config.json. Raises UsageError that names what is missing or not supported."""
    if "model_type" not in hf:
        raise UsageError("it lacks 'model_type'")
    return find_family(hf["model_type"]).config_from_hf(hf)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Write the content of a config.json, readable by transformers 4 and 5."""
    return find_family(config.family).config_to_hf(config)
