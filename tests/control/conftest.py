from collections.abc import Iterator
from pathlib import Path

import pytest
from control_helpers import Service, serving


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path / "head") as running:
        yield running
