"""Issue texts: what a user would report of the failing behaviour, without a word about where the bug is."""

import random
import re
from collections.abc import Mapping, Sequence

from headway.envs.swe.archives import File
from headway.envs.swe.make.observing import Failure
from headway.sandboxes.sandbox import WORK

_OPENINGS = (
    "Something that used to work in {package} {version} no longer does.",
    "{package} {version} behaves differently from what its documentation promises.",
    "I updated to the current state of {package} {version}, and some of my code broke.",
    "There seems to be a regression in {package} {version}.",
)
_CLOSINGS = (
    "I expect the behaviour described above. Everything else that works must go on working.",
    "Please find the cause and fix it without changing what works today.",
    "It worked in the last release. The fix should be in the package's own code.",
)
_SHOWN = 3


def write_issue(
    package: str, version: str, failures: Sequence[Failure], files: Mapping[str, File], rng: random.Random
) -> str:
    """Write an issue from failed tests: what was run, what came of it, and what else fails like it."""
    seen: dict[str, Failure] = {}
    for failure in failures:
        seen.setdefault(f"{_statement(failure, files)}|{_reason(failure)}", failure)
    shown = list(seen.values())[:_SHOWN]
    lines = [f"# {_title(package, shown[0])}", "", rng.choice(_OPENINGS).format(package=package, version=version), ""]
    for failure in shown:
        if statement := _statement(failure, files):
            lines += ["This fails:", "", "```python", *statement.splitlines(), "```", ""]
        else:
            lines += [f"This fails: {_spoken(failure.id)}", ""]
        lines += ["It ends with:", "", "```", *_reason(failure).splitlines()[:12], "```", ""]
    rest = list(dict.fromkeys(_spoken(failure.id) for failure in failures))[: 4 * _SHOWN]
    if len(failures) > len(shown):
        lines += [f"In all, {len(failures)} cases go wrong. They are about: {'; '.join(rest)}.", ""]
    return "\n".join([*lines, rng.choice(_CLOSINGS)]) + "\n"


def _title(package: str, failure: Failure) -> str:
    name = re.match(r"\w+", failure.message)
    kind = name[0] if name and name[0] not in ("assert", "AssertionError") else "Wrong result"
    return f"{kind} in {package}: {_spoken(failure.id)}"


def _spoken(name: str) -> str:
    """A test's name in words: `tests/test_a.py::TestB::test_long_word[x-1]` is "b, long word"."""
    parts = [part.partition("[")[0] for part in name.split("::")[1:]]
    words = [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", re.sub(r"(?i)^_*tests?_?|_?tests?$", "", part)) for part in parts]
    return (
        ", ".join(word.replace("_", " ").strip().lower() for word in words if word.strip("_ ")) or "its main function"
    )


def _statement(failure: Failure, files: Mapping[str, File]) -> str:
    """The statement of the test that failed, and what it needs of the lines before it in the same test."""
    path = failure.id.partition("::")[0]
    # The line that raised may be in the package's code, which the issue's author does not name.
    found = re.findall(rf"^{re.escape(path)}:(\d+):", failure.text, re.MULTILINE)
    line = failure.line if failure.path.removeprefix(f"{WORK}/") == path else int(found[-1]) if found else 0
    if not line or path not in files:
        return ""
    lines = files[path].data.decode(errors="replace").splitlines()
    first = next((n for n in range(line - 1, -1, -1) if re.match(r"\s*(async )?def ", lines[n])), line - 1)
    body = lines[max(first + 1, line - 12) : line]
    indent = min((len(text) - len(text.lstrip()) for text in body if text.strip()), default=0)
    shown = [text[indent:] for text in body if text.strip() and not text.strip().startswith(("#", '"""', "'''"))]
    return "\n".join(re.sub(r"\bself\.assert", "assert", text) for text in shown)


def _reason(failure: Failure) -> str:
    reason = failure.message or failure.text.strip().splitlines()[-1] if failure.text.strip() else failure.message
    return re.sub(rf"{re.escape(WORK)}/\S+?\.py(:\d+)?", "…", reason).strip() or "an error"
