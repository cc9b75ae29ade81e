"""Experts are stacked here, gate above up; in the checkpoint every expert has three matrices of its own."""

from headway.models.config import ModelConfig
from headway.models.layout import Part


def parts(name: str, config: ModelConfig) -> list[Part]:
    prefix, found, projection = name.partition(".mlp.experts.")
    if not found:
        return [Part(name)]
    width, experts = config.expert_width, [f"{prefix}.mlp.experts.{e}" for e in range(config.experts)]
    if projection == "down_proj":
        return [Part(f"{expert}.down_proj.weight", (e,)) for e, expert in enumerate(experts)]
    gate, up = slice(0, width), slice(width, 2 * width)
    return [
        part
        for e, expert in enumerate(experts)
        for part in (Part(f"{expert}.gate_proj.weight", (e, gate)), Part(f"{expert}.up_proj.weight", (e, up)))
    ]
