"""A small repository with bugs, for trying the environment without making tasks first."""

from pathlib import Path

from headway.envs.swe.archives import File, digest, pack
from headway.envs.swe.patches import make_patch
from headway.envs.swe.tasks import Repository, SweTask, TaskFolder

_INTERVALS = '''"""Closed intervals of whole numbers."""


def overlap(a, b):
    """The numbers that lie in both intervals, as an interval; None where there are none."""
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return (low, high) if low <= high else None


def merged(intervals):
    """Join intervals that overlap or touch, in order."""
    result = []
    for low, high in sorted(intervals):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(result[-1][1], high))
        else:
            result.append((low, high))
    return result
'''
_TEXT = '''"""Words and lines."""


def wrap(text, width):
    """Break a text into lines of at most `width` characters, between words."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    if line:
        lines.append(line)
    return lines


def initials(name):
    """First letters of all names, as capitals with dots."""
    return "".join(part[0].upper() + "." for part in name.split() if part)
'''
_TESTS = {
    "tests/test_intervals.py": """from smallkit.intervals import merged, overlap


def test_overlap_in_the_middle():
    assert overlap((1, 5), (3, 9)) == (3, 5)


def test_overlap_in_one_number():
    assert overlap((1, 3), (3, 9)) == (3, 3)


def test_no_overlap():
    assert overlap((1, 2), (4, 9)) is None


def test_merged_joins_neighbours():
    assert merged([(5, 6), (1, 2), (3, 4)]) == [(1, 6)]


def test_merged_keeps_gaps():
    assert merged([(1, 2), (4, 5)]) == [(1, 2), (4, 5)]


def test_merged_of_contained():
    assert merged([(1, 9), (2, 3)]) == [(1, 9)]
""",
    "tests/test_text.py": """from smallkit.text import initials, wrap


def test_wrap_breaks_between_words():
    assert wrap("a bb ccc", 4) == ["a bb", "ccc"]


def test_wrap_keeps_the_last_line():
    assert wrap("one two", 3) == ["one", "two"]


def test_wrap_of_nothing():
    assert wrap("", 3) == []


def test_initials():
    assert initials("ada lovelace") == "A.L."
""",
}
FILES = {
    "README.md": File(b"# smallkit\n\nIntervals and text. Run the tests with `python -m pytest`.\n"),
    "smallkit/__init__.py": File(b""),
    "smallkit/intervals.py": File(_INTERVALS.encode()),
    "smallkit/text.py": File(_TEXT.encode()),
    **{path: File(text.encode()) for path, text in _TESTS.items()},
}
_BUGS = [
    ("smallkit/intervals.py", "low <= high else", "low < high else", "boundary", ["intervals:overlap_in_one_number"]),
    (
        "smallkit/intervals.py",
        "max(result[-1][1], high)",
        "high",
        "argument",
        ["intervals:merged_of_contained"],
    ),
    (
        "smallkit/text.py",
        "    if line:\n        lines.append(line)\n    return",
        "    return",
        "branch",
        ["text:wrap_breaks_between_words", "text:wrap_keeps_the_last_line"],
    ),
]
_ISSUES = {
    "boundary": "# overlap misses intervals that share one number\n\n`overlap((1, 3), (3, 9))` gives None. "
    "I expect `(3, 3)`: both intervals contain 3.\n",
    "argument": "# merged loses the end of an interval\n\n`merged([(1, 9), (2, 3)])` gives `[(1, 3)]`. "
    "I expect `[(1, 9)]`.\n",
    "branch": '# wrap drops the last line\n\n`wrap("one two", 3)` gives `["one"]`. I expect `["one", "two"]`.\n',
}


class DemoFolder(TaskFolder):
    """Three tasks in one repository, kept in memory. Its tests use this interpreter's pytest."""

    def __init__(self) -> None:
        super().__init__(Path())

    def tasks(self) -> list[SweTask]:
        return [
            SweTask(
                id=f"smallkit.{kind}",
                repository="smallkit",
                issue=_ISSUES[kind],
                fail_to_pass=["tests/test_{}.py::test_{}".format(*name.split(":")) for name in names],
                patch=_patch(path, right, wrong),
                kinds=[kind],
            )
            for path, right, wrong, kind, names in _BUGS
        ]

    def repositories(self) -> dict[str, Repository]:
        passing = [
            f"{path}::{line[4:-3]}"
            for path, text in _TESTS.items()
            for line in text.splitlines()
            if line.startswith("def test_")
        ]
        tests = sorted(_TESTS)
        return {"smallkit": Repository("smallkit", digest(pack(FILES)), "", ["."], ["smallkit"], tests, passing)}

    def files(self, repository: Repository) -> dict[str, File]:
        return dict(FILES)


def _patch(path: str, right: str, wrong: str) -> str:
    whole = FILES[path].data.decode()
    return make_patch({path: whole.replace(right, wrong)}, {path: whole})
