"""OLMo 3: OLMo 2 with sliding windows in three of four layers; rotary scaling is that of the other layers alone."""

from collections.abc import Sequence
from typing import Any

from headway.models.configs.layer_types import FULL, SLIDING
from headway.models.families.olmo2 import Olmo2
from headway.models.rotary_kinds import RotaryKinds


class Olmo3(RotaryKinds, Olmo2):
    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    examples = "OLMo 3 7B and 32B"
    notes = "OLMo 2 with windows; rotary scaling in the other layers"
    hf_defaults = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
    rope_theta = 500_000.0
    sliding_rope_theta = 500_000.0

    def layer_types(self, hf: dict[str, Any]) -> Sequence[str]:
        return [FULL if (layer + 1) % 4 == 0 else SLIDING for layer in range(hf["num_hidden_layers"])]
