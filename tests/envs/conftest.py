"""A real engine for the tests of this folder: `headway serve tiny` in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The engine's URL. The built-in model lies in a cache of this session."""
    before = os.environ.get("HEADWAY_CACHE")
    os.environ["HEADWAY_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    command = [sys.executable, "-m", "headway.cli.main", "serve", "tiny", "--port", "0", "--inference.threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = next((line for line in server.stdout if line.startswith("serving")), None)
        assert line is not None, "headway serve ended before it served"
        yield line.split(" at ")[1].split()[0]
    finally:
        server.terminate()
        server.wait(30)
        if before is None:
            del os.environ["HEADWAY_CACHE"]
        else:
            os.environ["HEADWAY_CACHE"] = before


@pytest.fixture(scope="session")
def tiny(engine: str) -> Path:
    """The folder of the model that the engine serves."""
    from headway.models.tiny import resolve_model

    return resolve_model("tiny")
