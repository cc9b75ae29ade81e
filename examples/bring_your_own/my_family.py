"""A model family of one's own: the `model_type` of its checkpoints, and how its blocks differ from a known family's."""

from headway.models.families.qwen3 import Qwen3


class Quiet(Qwen3):
    """Qwen3 under another name; override `block` to build other layers (docs/models.md)."""

    model_type = "quiet"
    architecture = "QuietForCausalLM"
