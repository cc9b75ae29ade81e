"""Patches: applied they give the other side, reversed they give this one, and what does not fit is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.base.errors import UsageError
from headway.envs.swe.patches import apply_patch, make_patch, touched

LINE = st.text(st.sampled_from("ab -+@\\\f\t"), max_size=6)
TEXT = st.tuples(st.lists(LINE, max_size=12), st.booleans()).map(lambda x: "\n".join(x[0]) + "\n" * x[1])


@given(TEXT, TEXT)
def test_a_patch_leads_there_and_back(before: str, after: str) -> None:
    patch = make_patch({"x/a.py": before}, {"x/a.py": after})
    assert apply_patch({"x/a.py": before}, patch) == ({"x/a.py": after} if before != after else {})
    assert apply_patch({"x/a.py": after}, patch, reverse=True) == ({"x/a.py": before} if before != after else {})


def test_files_are_created_and_deleted() -> None:
    patch = make_patch({"old.py": "x\n"}, {"new.py": "y\n"})
    assert apply_patch({"old.py": "x\n"}, patch) == {"old.py": None, "new.py": "y\n"}
    assert touched(patch) == {"old.py", "new.py"}


def test_gits_own_patches_are_read() -> None:
    patch = (
        "diff --git a/m.py b/m.py\nindex 1..2 100644\n--- a/m.py\n+++ b/m.py\n@@ -1,3 +1,3 @@ def f():\n a\n-b\n+c\n"
        " d\n@@ -9 +9 @@\n-i\n+j\n\\ No newline at end of file\n"
    )
    assert apply_patch({"m.py": "a\nb\nd\n4\n5\n6\n7\n8\ni\n"}, patch) == {"m.py": "a\nc\nd\n4\n5\n6\n7\n8\nj"}


@pytest.mark.parametrize(
    ("files", "patch", "reason"),
    [
        ({"a": "1\n"}, make_patch({"a": "2\n"}, {"a": "3\n"}), "does not fit a"),
        ({}, make_patch({"a": "2\n"}, {"a": "3\n"}), "which is not there"),
        ({"a": "2\n"}, make_patch({"a": "2\n"}, {"a": "3\n"})[:-4], "cut off or damaged"),
    ],
)
def test_patches_that_do_not_fit_are_refused(files: dict[str, str], patch: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        apply_patch(files, patch)
