"""One taught model and one server of each engine for the whole folder."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
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
    # Its tokenizer is for replies in JSON alone.
    begun = start_vllm(taught, log, "--inference.vllm.skip_tokenizer_init", "false")
    live = vllm_server(begun, taught, log)
    yield live
    live.close()


LAYOUTS = {"tensor": "tensor_parallel_size", "data": "data_parallel_size"}


@pytest.fixture(scope="session")
def vllm_ranks(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VllmServer]]:
    """Servers of vLLM with two ranks each, one after the other: side by side, they may start too slowly for vLLM."""
    with ExitStack() as stack:
        live = {}
        for name, argument in LAYOUTS.items():
            log = tmp_path_factory.mktemp(name) / "log"
            workers = ["--inference.vllm.worker_extension_cls", "damaged_workers.DamagedWorker"]
            begun = start_vllm(taught, log, f"--inference.vllm.{argument}", "2", *workers)
            stack.callback(end, begun)
            live[name] = vllm_server(begun, taught, log)
        yield live


def end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.wait(60)


@pytest.fixture(scope="session")
def vllm_tensor(vllm_ranks: dict[str, VllmServer]) -> VllmServer:
    return vllm_ranks["tensor"]


@pytest.fixture(scope="session")
def vllm_data(vllm_ranks: dict[str, VllmServer]) -> VllmServer:
    return vllm_ranks["data"]


ENOUGH = pytest.mark.timeout(900)
ENGINES = [
    "embedded",
    pytest.param("vllm", marks=[pytest.mark.vllm, ENOUGH]),
    *(
        pytest.param(f"vllm_{name}", marks=[pytest.mark.vllm, pytest.mark.slow, pytest.mark.alone, ENOUGH])
        for name in LAYOUTS
    ),
]


@pytest.fixture(scope="session", params=ENGINES)
def server(request: pytest.FixtureRequest) -> LiveServer:
    """A server of each engine; every protocol test runs against all of them."""
    live: LiveServer = request.getfixturevalue(request.param)
    return live
