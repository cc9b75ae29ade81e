"""Choosing the renderer of a checkpoint."""

from pathlib import Path

from headway.core.errors import HeadwayError
from headway.rendering.base import Renderer
from headway.rendering.chatml import ChatMLRenderer
from headway.rendering.styles import STYLES
from headway.rendering.tokenizer import load_tokenizer


def load_renderer(folder: Path, name: str = "auto") -> Renderer:
    """The renderer called `name` over the tokenizer in `folder`."""
    style = "chatml" if name == "auto" else name
    if style not in STYLES:
        raise HeadwayError(f'unknown renderer "{name}"; known: auto, {", ".join(STYLES)}')
    return ChatMLRenderer(load_tokenizer(folder), STYLES[style])
