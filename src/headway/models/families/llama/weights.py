"""Parameters and tensors of the checkpoint are the same, one to one."""

from headway.models.config import ModelConfig
from headway.models.layout import Part


def parts(name: str, config: ModelConfig) -> list[Part]:
    return [Part(name)]
