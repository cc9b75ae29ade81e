"""Grading: in a fresh sandbox that holds the work folder as the model left it, with the tests put back.

Nothing that ran before is there: no processes, no home or temporary folder, no variables. What Python and pytest would
load by themselves from the work folder is removed, unless it is among what is put back.
"""

import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from headway.sandboxes.pool import SandboxPool
from headway.sandboxes.recipe import Recipe
from headway.sandboxes.sandbox import WORK, Limits, Sandbox, SandboxError, Snapshot

VARIABLES = {
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONPYCACHEPREFIX": "/tmp/bytecode",  # cached bytecode in the work folder is not looked at
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
_LOADED_UNASKED = [
    "sitecustomize.py",
    "usercustomize.py",
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    "tox.ini",
    "*.pth",
    "*.pyc",
    "pytest.py",
    "pytest",
    "_pytest",
    "pluggy",
]

_PLUGIN = """
import json, os
class Report:
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            with open(os.environ["HEADWAY_REPORT"], "a") as file:
                file.write(json.dumps([report.nodeid, report.outcome]) + "\\n")
def pytest_configure(config):
    config.pluginmanager.register(Report())
"""
_START = "import sys; sys.path[:] = [p for p in sys.path if p]; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
"""As `-P -m pytest`, which is for Python 3.11 and later: the current folder is not imported from."""
_CANARY = """
def test_right_NONCE(): assert True
def test_wrong_NONCE(): assert 1 == 2
def test_raises_NONCE(): raise RuntimeError
"""


@asynccontextmanager
async def fresh_fork(
    pool: SandboxPool,
    snapshot: Snapshot,
    restored: Mapping[str, bytes],
    limits: Limits,
    *,
    recipe: Recipe | None = None,
    owner: str = "grading",
) -> AsyncIterator[Sandbox]:
    """Lend a sandbox with the snapshot's work folder, cleaned of what loads unasked, and `restored` written over it.

    Of the recipe only `readable` counts.
    """
    async with pool.sandbox(recipe, limits, snapshot=snapshot, owner=owner) as box:
        named = [word for pattern in _LOADED_UNASKED for word in ("-o", "-name", pattern)][1:]
        # -exec rm, and not -delete: folders of those names go as well.
        argv = [
            "find",
            box.resolve(WORK),
            "-depth",
            "-mindepth",
            "1",
            "(",
            *named,
            ")",
            "-exec",
            "rm",
            "-rf",
            "{}",
            "+",
        ]
        cleaned = await box.run(argv)
        if cleaned.exit_code:
            raise SandboxError(f"the work folder could not be cleaned for grading: {cleaned.stderr[-500:]}")
        for path, data in restored.items():
            # A link or a folder in its place would lead the write elsewhere.
            await box.run(["rm", "-rf", "--", box.resolve(path)])
            await box.write(path, data)
        yield box


async def passes(box: Sandbox, check: Mapping[str, Any]) -> bool:
    """Run one check: `run` is a command for sh; its output is compared with `stdout` here, outside the sandbox."""
    stdin = str(check.get("stdin", "")).encode()
    done = await box.run(["sh", "-c", check["run"]], stdin=stdin, env=VARIABLES)
    if "stdout" in check and done.stdout.strip() != str(check["stdout"]).strip():
        return False
    return done.limit is None and done.exit_code == check.get("exit_code", 0)


async def run_pytest(
    box: Sandbox,
    files: Sequence[str],
    *,
    python: str = "python3",
    config: str | None = None,
    conftest: bool = False,
    path: Sequence[str] = (),
    plugin: str = "",
    seconds: float | None = None,
    trusted_cache: bool = False,
    explain: bool = True,
    installed: bool = False,
) -> dict[str, str]:
    """Outcomes by test id; empty where the report can't be believed.

    Tests run in one process with the code they test, which could forge the report. So tests are added of which some
    must fail: a report without them, or with other outcomes, counts as no report. `config` is pytest's settings file,
    in the sandbox; `conftest` loads conftest files also without one; `path` are folders to import from, such as "src",
    in their order and before the work folder; `plugin` is the text of a pytest plugin of yours. `trusted_cache` uses
    bytecode that lies beside the sources: for work folders in which none is the model's. Without `explain`, tests are
    not rewritten to say why an assertion failed, which is twice as fast. `installed` is for an interpreter that nothing
    of the model's can have changed: of any version, and pytest loads the plugins that are installed in it.
    """
    nonce = secrets.token_hex(8)
    canary, report = f"/tmp/{nonce}/test_{nonce}.py", f"/tmp/{nonce}/report"
    await box.write(canary, _CANARY.replace("NONCE", nonce).encode())
    await box.write(f"/tmp/{nonce}/plugin_{nonce}.py", (_PLUGIN + plugin).encode())
    folders = [box.resolve(folder) for folder in (*path, WORK)]
    env = {**VARIABLES, "PYTHONPATH": ":".join([f"/tmp/{nonce}", *folders]), "HEADWAY_REPORT": report}
    if trusted_cache:
        del env["PYTHONPYCACHEPREFIX"]
    if installed:
        del env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
    options = _pytest_options(nonce, box.resolve(WORK), config, conftest=conftest, explain=explain)
    start = ["-c", _START] if installed else ["-P", "-m", "pytest"]
    await box.run([python, *start, *options, canary, *files], env=env, seconds=seconds)
    return await _believed_outcomes(box, report, nonce)


def _pytest_options(nonce: str, root: str, config: str | None, *, conftest: bool, explain: bool) -> list[str]:
    """Options of a pytest that takes nothing from the work folder which it is not told to, and loads our plugin."""
    plugins = ["-p", "no:cacheprovider", "-p", f"plugin_{nonce}"]
    settings = ["-c", config or "/dev/null", "--rootdir", root, "-o", "addopts="]
    isolation = [] if config or conftest else ["--noconftest"]
    plain = [] if explain else ["--assert=plain"]
    return ["-q", "--continue-on-collection-errors", *plugins, *settings, *isolation, *plain]


async def _believed_outcomes(box: Sandbox, report: str, nonce: str) -> dict[str, str]:
    """Read a report's outcomes, less those of the added tests; none unless just these ended as they must."""
    try:
        lines = (await box.read(report, 16 << 20)).decode(errors="replace").splitlines()
        outcomes = {str(name): str(outcome) for name, outcome in map(json.loads, lines)}
    except (SandboxError, ValueError, TypeError):
        return {}
    canaries = {
        name.rpartition("::")[2].removesuffix(f"_{nonce}"): outcomes.pop(name)
        for name in list(outcomes)
        if nonce in name
    }
    expected = {"test_right": "passed", "test_wrong": "failed", "test_raises": "failed"}
    return outcomes if canaries == expected else {}
