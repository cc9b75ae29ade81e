"""Text that grows token by token."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.inference.server.stops import StopStrings
from headway.inference.server.text import Text
from headway.models.tiny_tokenizer import save_tiny_tokenizer
from headway.rendering.base import Renderer
from headway.rendering.load import load_renderer


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    return load_renderer(folder)


def feed(text: Text, tokens: list[int], sizes: list[int]) -> str:
    """Hand over `tokens` in pieces; everything that was shown."""
    shown, start = "", 0
    for size in sizes:
        shown += text.take(tokens[start : start + size])
        start += size
        assert text.stopped or text.text.startswith(shown)
    return shown + text.take(tokens[start:], last=True)


words = st.text(alphabet="abé漢🙂 .", max_size=30)


@settings(max_examples=150, deadline=None)
@given(words, st.lists(st.integers(1, 5), max_size=30))
def test_pieces_add_up_to_the_whole(renderer: Renderer, words: str, sizes: list[int]) -> None:
    assert feed(Text(renderer, frozenset()), renderer.encode(words), sizes) == words


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="ab.", max_size=30),
    st.lists(st.text(alphabet="ab.", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_nothing_of_a_stop_string_is_ever_shown(renderer: Renderer, words: str, stops: list[str], size: int) -> None:
    tokens = renderer.encode(words)
    text = Text(renderer, frozenset(), StopStrings(stops))
    shown = ""
    for start in range(0, len(tokens), size):
        shown += text.take(tokens[start : start + size], last=start + size >= len(tokens))
        if text.stopped:
            break
    ends = [end for end in range(1, len(words) + 1) if any(words[:end].endswith(stop) for stop in stops)]
    assert text.stopped == bool(ends)
    assert not any(stop in shown for stop in stops)
    assert words.startswith(shown)
    if not ends:
        assert shown == words
