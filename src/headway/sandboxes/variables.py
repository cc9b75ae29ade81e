"""Environment variables for programs of others: a small clean set, never the user's."""

import os
import sys
from collections.abc import Mapping

_KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Variables that say where programs are and how they write, and hold no secrets."""


def clean_variables(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what a program outside a sandbox gets: where programs lie, and `added`; no tokens, no home folder."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    kept.setdefault("PATH", os.defpath)
    python = os.path.dirname(sys.executable)  # noqa: PTH120 - the text as it is, not resolved
    if python not in kept["PATH"].split(os.pathsep):
        kept["PATH"] = f"{python}{os.pathsep}{kept['PATH']}"
    return {**kept, **(added or {})}
