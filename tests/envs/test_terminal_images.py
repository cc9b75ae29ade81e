"""Images at a terminal: inline where it says that it shows them, else as files."""

import base64
import re
from pathlib import Path

import pytest

from headway.core.images import MessageImage
from headway.core.messages import Message
from headway.envs.terminal_images import name_image, terminal_images
from headway.envs.transcript import message_text, plain

PNG = b"\x89PNG" + bytes(range(256)) * 40


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A terminal that says nothing of itself."""
    for name in ("TERM_PROGRAM", "KITTY_WINDOW_ID", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return monkeypatch


def test_other_terminals_get_a_path(bare: pytest.MonkeyPatch) -> None:
    image = MessageImage.of(PNG)
    text = message_text(Message("user", "Which?", images=(image,)), plain, terminal_images({}, inline=True))
    found = re.fullmatch(r"user: Which\? \[image (.+\.png)\]", text)
    assert found is not None and Path(found[1]).read_bytes() == PNG


def test_pipes_get_a_path_and_unknown_bytes_a_name(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("KITTY_WINDOW_ID", "1")
    image = MessageImage.of(PNG)
    without = MessageImage(0, image.digest)
    assert ".png]" in terminal_images({image.digest: PNG}, inline=False)(without)
    assert terminal_images({}, inline=True)(without) == name_image(without)


def test_kitty_gets_pieces_of_png_and_iterm_everything_at_once(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("KITTY_WINDOW_ID", "1")
    shown = terminal_images({}, inline=True)(MessageImage.of(PNG))
    pieces = re.findall(r"\x1b_G(.*?);(.*?)\x1b\\", shown)
    assert [head for head, _ in pieces] == ["a=T,f=100,m=1", "m=1", "m=1", "m=0"]
    assert max(len(piece) for _, piece in pieces) == 4096
    assert base64.b64decode("".join(piece for _, piece in pieces)) == PNG
    jpeg = b"\xff\xd8\xff" + PNG
    assert ".jpeg]" in terminal_images({}, inline=True)(MessageImage.of(jpeg))
    bare.setenv("TERM_PROGRAM", "iTerm.app")
    found = re.fullmatch(
        r"\n\x1b]1337;File=inline=1;size=(\d+):(.*)\a\n", terminal_images({}, inline=True)(MessageImage.of(jpeg))
    )
    assert found is not None and int(found[1]) == len(jpeg) and base64.b64decode(found[2]) == jpeg
