"""Images at a terminal: inline where it says that it can show them (protocols of kitty or iTerm2), else a path."""

import base64
import sys
import tempfile
from collections.abc import Callable, Mapping
from os import environ
from pathlib import Path

from headway.core.images import IMAGE_TYPES, MessageImage

ShowImage = Callable[[MessageImage], str]
"""Writes an image as text for a terminal."""
_PIECE = 4096
"""Characters of one of kitty's messages, at most."""


def name_image(image: MessageImage) -> str:
    """The beginning of its hash alone."""
    return f"[image {image.digest[:8]}]"


def terminal_images(files: Mapping[str, bytes], *, inline: bool | None = None) -> ShowImage:
    """Show images at this terminal. `files` has the bytes, by digest, of those that come without. Files that are named
    by a path are in a temporary folder, and stay. `inline` is whether the output is a terminal, if not asked for."""
    at_terminal = sys.stdout.isatty() if inline is None else inline
    folder: list[Path] = []

    def show(image: MessageImage) -> str:
        data = image.data or files.get(image.digest, b"")
        if not data:
            return name_image(image)
        if at_terminal and (escape := _escape(data, environ)):
            return f"\n{escape}\n"
        if not folder:
            folder.append(Path(tempfile.mkdtemp(prefix="headway-images-")))
        kind = next((kind for start, kind in IMAGE_TYPES.items() if data.startswith(start)), "bin")
        path = folder[0] / f"{image.digest}.{kind}"
        path.write_bytes(data)
        return f"[image {path}]"

    return show


def _escape(data: bytes, variables: Mapping[str, str]) -> str | None:
    """The sequence that shows an image, by what the terminal says of itself; None where it says nothing."""
    program = variables.get("TERM_PROGRAM", "")
    encoded = base64.b64encode(data).decode()
    if program in ("iTerm.app", "WezTerm"):
        return f"\x1b]1337;File=inline=1;size={len(data)}:{encoded}\a"
    kitty = "KITTY_WINDOW_ID" in variables or program == "ghostty" or variables.get("TERM") == "xterm-kitty"
    if not kitty or not data.startswith(b"\x89PNG"):  # kitty decodes no other type by itself
        return None
    pieces = [encoded[start : start + _PIECE] for start in range(0, len(encoded), _PIECE)]
    last = len(pieces) - 1
    heads = [f"{'a=T,f=100,' if not number else ''}m={int(number < last)}" for number in range(len(pieces))]
    return "".join(f"\x1b_G{head};{piece}\x1b\\" for head, piece in zip(heads, pieces, strict=True))
