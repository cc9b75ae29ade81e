"""What every contender is given: one model, prompts of one length, and how much to sample."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

SMALL = {"width": 256, "layers": 4, "heads": 8, "kv_heads": 4, "mlp_width": 768}
"""The shape of "small": 3.2M parameters, with tiny's tokenizer."""


@dataclass(frozen=True)
class Work:
    """Sampled at temperature 1 with the logprob of every sampled token; nobody stops early."""

    folder: str
    vocab: int
    device: str
    dtype: str
    sequences: int
    prompt: int
    output: int
    threads: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.output

    def prompts(self) -> list[list[int]]:
        numbers = random.Random(0)
        return [[numbers.randrange(self.vocab) for _ in range(self.prompt)] for _ in range(self.sequences)]


def model_folder(name: str, temporary: Path) -> Path:
    """A checkpoint folder: `name` itself, a built-in's, or the small model, made in `temporary`."""
    from headway.models.checkpoint import load_config, save_checkpoint
    from headway.models.registry import build_model
    from headway.models.tiny import resolve_model

    if name != "small":
        return resolve_model(name)
    tiny = resolve_model("tiny")
    save_checkpoint(build_model(replace(load_config(tiny), **SMALL)), temporary / "small", files_from=tiny)
    return temporary / "small"
