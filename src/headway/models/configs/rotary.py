"""Settings of rotary positions, and their forms in config.json. Imports no torch."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from headway.base.errors import UsageError

DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True)
class RopeScaling:
    """Stretches rotary frequencies beyond the trained context, by the rule `type`:

    - `linear`: all alike.
    - `llama3`: slow ones by the factor, fast ones not at all, those between interpolated by their wavelengths.
    - `yarn` (https://arxiv.org/abs/2309.00071): the same by their number of turns in the trained context, between
      `beta_fast` and `beta_slow`; cos and sin are scaled by `attention_factor`, or else by one that follows from
      `factor`, `mscale` and `mscale_all_dim`. `truncate` rounds the bounds to whole frequencies.
    - `dynamic`: by the length of a sequence, where that exceeds the model's context: here it never does.
    """

    type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def magnitude(self, mscale: float = 1.0) -> float:
        """YaRN's factor for scores of a context that is `factor` times as long as the trained one."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def rotary_factor(self) -> float:
        """The factor of cos and sin."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)
        return self.magnitude()


@dataclass(frozen=True)
class RopeParameters:
    """One table of rotary positions: the first `dim` numbers of a head are rotated."""

    theta: float
    dim: int
    scaling: RopeScaling | None = None


_LENGTH = {"original_max_len": "original_max_position_embeddings"}
SCALING_NAMES: dict[str, Mapping[str, str]] = {
    "linear": {},
    "dynamic": {},
    "llama3": {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor", **_LENGTH},
    "yarn": {
        **{name: name for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")},
        "truncate": "truncate",
        **_LENGTH,
    },
}
"""Fields of `RopeScaling` besides `factor` and their names in config.json, by type."""

_WRITTEN = ("original_max_len", "beta_fast", "beta_slow")
_ALWAYS_KNOWN = ("rope_theta", "rope_type", "type", "partial_rotary_factor", "factor")


def rope_from_hf(
    hf: Mapping[str, Any], *, theta: float = DEFAULT_ROPE_THETA, ignored: Collection[str] = ()
) -> dict[str, Any]:
    """Read the model's rotary settings: transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters with
    both. `theta` is the family's default. Raises UsageError for an entry that is neither understood nor `ignored`."""
    parameters = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    base = parameters.get("rope_theta", hf.get("rope_theta", theta))
    scaling = scaling_from_hf(parameters, hf.get("max_position_embeddings", 0), ignored)
    found: dict[str, Any] = {"rope_theta": base, "rope_scaling": scaling}
    share = parameters.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if share is not None and share != 1:
        found["rotary_dim"] = int(share * hf["head_dim"])
    return found


def scaling_from_hf(parameters: Mapping[str, Any], max_len: int, ignored: Collection[str] = ()) -> RopeScaling | None:
    """Read the scaling of one set of rope_parameters. None: frequencies are not scaled."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default" and kind not in SCALING_NAMES:
        raise UsageError(f"rotary scaling {kind!r} is not supported (known: default, {', '.join(SCALING_NAMES)})")
    names = SCALING_NAMES.get(kind, {})
    known = {*_ALWAYS_KNOWN, *names.values(), *_LENGTH.values(), *ignored}
    if unknown := [name for name, value in parameters.items() if value is not None and name not in known]:
        raise UsageError(f"rope_parameters.{unknown[0]} has no effect on rotary scaling {kind!r} here; remove it")
    if kind == "default":
        return None
    values = {field: parameters[name] for field, name in names.items() if parameters.get(name) is not None}
    if "original_max_len" in names:
        values.setdefault("original_max_len", max_len)
    return RopeScaling(kind, parameters["factor"], **values)


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any]:
    """Write what `scaling_from_hf` reads; of yarn's settings those that are not the default, or that vLLM asks for."""
    if scaling is None:
        return {"rope_type": "default"}
    defaults = {field.name: field.default for field in fields(RopeScaling)}
    written = {
        name: getattr(scaling, field)
        for field, name in SCALING_NAMES[scaling.type].items()
        if scaling.type == "llama3" or field in _WRITTEN or getattr(scaling, field) != defaults[field]
    }
    return {"rope_type": scaling.type, "factor": scaling.factor, **written}


def rope_to_hf(rope: RopeParameters, head_dim: int) -> dict[str, Any]:
    """Write the model's rotary settings for transformers 4 and 5."""
    parameters = scaling_to_hf(rope.scaling)
    share = {} if rope.dim == head_dim else {"partial_rotary_factor": rope.dim / head_dim}
    old = {} if rope.scaling is None else {"rope_scaling": parameters}
    return {
        "rope_theta": rope.theta,
        "rope_parameters": {"rope_theta": rope.theta, **parameters, **share},
        **share,
        **old,
    }
