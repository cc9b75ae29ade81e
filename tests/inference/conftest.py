"""One taught model and one server of each engine for the whole folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_serving import EmbeddedServer, LiveServer, VllmServer, start_server, start_vllm, teach, vllm_server


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teach(tmp_path_factory.mktemp("taught") / "files")


@pytest.fixture(scope="session")
def embedded(taught: Path) -> Iterator[EmbeddedServer]:
    live = start_server(taught)
    yield live
    live.close()


@pytest.fixture(scope="session")
def vllm(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    live = vllm_server(start_vllm(taught, log), taught, log)
    yield live
    live.close()


@pytest.fixture(
    scope="session",
    params=["embedded", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(900)])],
)
def server(request: pytest.FixtureRequest) -> LiveServer:
    """A server of each engine; every protocol test runs against all of them."""
    live: LiveServer = request.getfixturevalue(request.param)
    return live
