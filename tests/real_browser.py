"""A check whether the browser environment can use a real Chromium on this machine."""

from headway.base.errors import HeadwayError
from headway.envs.browser.chromium import find_chromium
from headway.sandboxes.kinds import available_kinds
from headway.sandboxes.local.cgroups import Cgroups


def missing() -> str | None:
    """Say why no real browser can be used here."""
    try:
        find_chromium()
    except HeadwayError as error:
        return str(error)
    if problem := Cgroups().problem:
        return f"Chromium does not start where address space is limited instead of control groups: {problem}"
    return available_kinds()["bubblewrap"] or None
