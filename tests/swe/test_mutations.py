"""Bugs are planted where they belong: every kind, and nothing else of the source changes."""

import ast
import inspect
import textwrap
from collections import Counter

import pytest

from headway.base.errors import UsageError
from headway.envs.swe.make.mutations import KINDS, check_kinds, mutations, plant

SOURCE = b'''"""Module."""
LIMIT = 3  # not in a function


class Thing:
    def size(self, n: int = 1, *, deep: bool = False) -> int:
        """Docstring."""
        if n < 10 and deep:  # \xc3\xa4 comment
            n = n + 1
            n += 2
        elif not deep:
            n = max(n, LIMIT)
        else:
            n = f(n, key=3)
        for i in range(n):
            total = i if n == i else -i
            print(f"{n + 1}")
        return n[1:]
'''


def changes() -> list[tuple[str, str]]:
    """The changed part of each planted source, before and after."""
    found = []
    for mutation in mutations(SOURCE):
        assert plant(SOURCE, [mutation]) is not None, mutation
        found.append((SOURCE[mutation.start : mutation.end].decode(), mutation.text.decode()))
    return found


def test_every_kind_is_found() -> None:
    made = changes()
    wanted = [
        ("n < 10", "n <= 10"),
        ("n < 10 and deep", "(n < 10 or deep)"),
        ("n + 1", "(n - 1)"),
        ("n += 2", "n -= 2"),
        ("not deep", "(deep)"),
        ("max(n, LIMIT)", "max(LIMIT, n)"),
        ("f(n, key=3)", "f(n)"),
        ("i if n == i else -i", "(-i if n == i else i)"),
        ("n == i", "n != i"),
        ("1", "2"),
        ("False", "True"),
        ("            n += 2\n", ""),
    ]
    assert not [pair for pair in wanted if pair not in made]
    assert set(Counter(m.kind for m in mutations(SOURCE))) >= set(KINDS) - {"constant"}
    assert any(new == "" and old.lstrip().startswith("else:") for old, new in made)  # a deleted branch
    assert not any("Docstring" in old for old, new in made)


def test_only_the_named_bytes_change() -> None:
    for mutation in mutations(SOURCE):
        planted = plant(SOURCE, [mutation])
        assert planted is not None
        assert planted[: mutation.start] == SOURCE[: mutation.start]
        assert planted[mutation.start + len(mutation.text) :] == SOURCE[mutation.end :]
        assert b"LIMIT = 3" in planted and b"\xc3\xa4 comment" in planted


def test_several_bugs_at_once_and_overlapping_ones_not() -> None:
    found = mutations(SOURCE)
    first = next(m for m in found if m.text == b"n <= 10")
    last = next(m for m in found if m.text == b"n != i")
    both = plant(SOURCE, [last, first])
    assert both is not None and b"n <= 10" in both and b"n != i" in both
    around = next(m for m in found if m.text == b"(n < 10 or deep)")
    assert plant(SOURCE, [first, around]) is None


def test_a_real_module_stays_python() -> None:
    source = inspect.getsource(textwrap).encode()
    found = mutations(source)
    assert len(found) > 100
    for mutation in found[::29]:
        planted = plant(source, [mutation])
        if planted is not None:
            ast.parse(planted)
            assert planted != source
    assert mutations(b"def broken(:") == []


def test_windows_line_ends_keep_their_places() -> None:
    source = b"def f(x):\r\n    y = x\r\n    return y < 1\r\n"
    texts = [plant(source, [m]) for m in mutations(source)]
    assert b"def f(x):\r\n    y = x\r\n    return y <= 1\r\n" in texts


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match="no kind of bug"):
        check_kinds(["operator", "typo"])
