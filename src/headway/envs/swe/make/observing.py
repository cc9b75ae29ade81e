"""Plugins for pytest inside a sandbox: they tell why tests failed, and which lines of the code each test ran."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.envs.swe.runtime import Runtime
from headway.sandboxes.sandbox import WORK, Sandbox, SandboxError

FAILURES, COVERAGE, ONLY = "/tmp/failures.jsonl", "/tmp/coverage.json", "/tmp/only.json"
MAX_REPORT = 48 << 20

_FAILURES = f"""
def pytest_runtest_logreport(report):
    if report.outcome != "failed":
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr)
    entry = {{"id": report.nodeid, "when": report.when, "text": text[-4000:]}}
    if crash is not None:
        entry.update(message=str(crash.message)[:2000], path=str(crash.path), line=crash.lineno)
    with open({FAILURES!r}, "a") as file:
        file.write(json.dumps(entry) + "\\n")
"""
_ONLY = f"""
def pytest_collection_modifyitems(items):
    with open({ONLY!r}) as file:
        only = set(json.load(file))
    # Tests in /tmp are not the repository's: grading adds them.
    items[:] = [item for item in items if item.nodeid in only or str(item.path).startswith("/tmp/")]
"""
_COVERAGE = f"""
import coverage, pytest
_cover = coverage.Coverage(data_file=None, config_file=False, source=["SOURCE"], messages=False)
_cover.start()
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    _cover.switch_context(item.nodeid)
    yield
    _cover.switch_context("")
def pytest_sessionfinish():
    _cover.stop()
    data, tests, files = _cover.get_data(), {{}}, {{}}
    for path in data.measured_files():
        lines = files[os.path.relpath(path, "SOURCE")] = {{}}
        for line, contexts in data.contexts_by_lineno(path).items():
            lines[line] = [tests.setdefault(context, len(tests)) for context in contexts]
    with open({COVERAGE!r}, "w") as file:
        json.dump({{"tests": list(tests), "files": files}}, file)
"""


@dataclass(frozen=True)
class Failure:
    """A failed test: its message, and the line of the test that failed, where that is known."""

    id: str
    when: str
    text: str
    message: str = ""
    path: str = ""
    line: int = 0


@dataclass(frozen=True)
class Coverage:
    """Tests by the lines that they ran: `lines[path][line]` are test ids; "" stands for the import."""

    lines: Mapping[str, Mapping[int, frozenset[str]]] = field(default_factory=dict)

    def tests(self, path: str, first: int, last: int) -> frozenset[str]:
        """Tests that ran one of the lines."""
        lines = self.lines.get(path, {})
        return frozenset().union(*(lines.get(line, frozenset()) for line in range(first, last + 1)))


async def observe(
    box: Sandbox, runtime: Runtime, tests: Sequence[str], *, only: Sequence[str] | None = None, seconds: float
) -> tuple[dict[str, str], list[Failure]]:
    """Run test files, or the tests of them named in `only`; returns outcomes by id, and the failures."""
    plugin = _FAILURES
    if only is not None:
        await box.write(ONLY, json.dumps(list(only)).encode())
        plugin += _ONLY
    outcomes = await runtime.outcomes(box, list(tests), plugin=plugin, explain=True, seconds=seconds)
    try:
        lines = (await box.read(FAILURES, MAX_REPORT)).decode(errors="replace").splitlines()
        failures = [Failure(**_fields(json.loads(line))) for line in lines]
    except (SandboxError, ValueError, TypeError):
        failures = []
    return outcomes, failures


async def cover(
    box: Sandbox, runtime: Runtime, tests: Sequence[str], *, seconds: float
) -> tuple[dict[str, str], Coverage]:
    """Run test files and record the lines that each test runs."""
    plugin = _COVERAGE.replace("SOURCE", box.resolve(WORK))
    outcomes = await runtime.outcomes(box, list(tests), plugin=plugin, seconds=seconds)
    try:
        found = json.loads(await box.read(COVERAGE, MAX_REPORT))
        names = found["tests"]
        lines = {
            path: {int(line): frozenset(names[index] for index in ran) for line, ran in lines.items()}
            for path, lines in found["files"].items()
        }
    except (SandboxError, ValueError, KeyError, IndexError, TypeError):
        return outcomes, Coverage()
    return outcomes, Coverage(lines)


def _fields(entry: dict[str, Any]) -> dict[str, Any]:
    kinds = {"id": str, "when": str, "text": str, "message": str, "path": str, "line": int}
    return {name: kind(entry[name]) for name, kind in kinds.items() if name in entry}
