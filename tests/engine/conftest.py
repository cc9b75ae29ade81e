"""One taught model and one server of it for the whole folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_serving import LiveServer, start_server, teach


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teach(tmp_path_factory.mktemp("taught") / "files")


@pytest.fixture(scope="session", params=["embedded"])
def server(request: pytest.FixtureRequest, taught: Path) -> Iterator[LiveServer]:
    """A server of each engine; every protocol test runs against all of them."""
    live = start_server(taught)
    yield live
    live.close()
