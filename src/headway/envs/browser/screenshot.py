"""Screenshots of pages with the numbers of elements on them."""

import io
from collections.abc import Sequence
from typing import NamedTuple

from headway.base.errors import UsageError
from headway.base.extras import install_command

INK, PAPER = (255, 255, 255), (190, 20, 60)


class Mark(NamedTuple):
    """An element's number, and its upper left corner in the window."""

    number: int
    x: float
    y: float


def draw_marks(png: bytes, marks: Sequence[Mark]) -> bytes:
    """Write the numbers of elements, in brackets, over their upper left corners."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise UsageError(f"browser: screenshots need Pillow: {install_command('vision')}") from None
    with Image.open(io.BytesIO(png)) as opened:
        image = opened.convert("RGB")
    draw = ImageDraw.Draw(image)
    for mark in marks:
        text = f"[{mark.number}]"
        _, top, right, bottom = draw.textbbox((0, 0), text)
        x = min(max(0, mark.x - 4), image.width - right - 2)
        y = min(max(0, mark.y - 6), image.height - bottom - 2)
        draw.rectangle((x, y + top - 1, x + right + 1, y + bottom + 1), fill=PAPER)
        draw.text((x + 1, y), text, fill=INK)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
