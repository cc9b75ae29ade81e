"""`headway serve` with vLLM that ends badly: what it says, and that it leaves nothing behind."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from engine_serving import start_vllm, vllm_server
from vllm_harness import TIED, make

from headway.models.checkpoints.folders import save_checkpoint
from headway.models.configs.config import ModelConfig
from headway.models.tiny_tokenizer import save_tiny_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Started:
    process: "subprocess.Popen[bytes]"
    folder: Path
    log: Path


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    """Servers that start side by side: vLLM's imports take one core of each."""
    servers = {}
    for name, config in (("whole", TIED), ("killed", TIED), ("without kernels", replace(TIED, head_dim=8))):
        place = tmp_path_factory.mktemp("server")
        folder = checkpoint(place, config)
        servers[name] = Started(start_vllm(folder, place / "log"), folder, place / "log")
    yield servers
    for server in servers.values():
        server.process.kill()
        server.process.wait(60)


def checkpoint(folder: Path, config: ModelConfig) -> Path:
    files = folder / "files"
    files.mkdir()
    vocab = save_tiny_tokenizer(files)
    save_checkpoint(make(replace(config, vocab_size=vocab), 0), folder / "model", files_from=files)
    return folder / "model"


def family_of(begun: Started) -> tuple[psutil.Process, list[psutil.Process]]:
    """vLLM's own process, and all that a server started, once that serves."""
    server = vllm_server(begun.process, begun.folder, begun.log)
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child for child in children if "EngineCore" in " ".join(child.cmdline()) + child.name()), children


def test_a_killed_server_takes_vllm_along(started: dict[str, Started]) -> None:
    """By itself: under `headway rl` a supervisor would end what is left."""
    server = started["killed"]
    engine, children = family_of(server)
    assert engine in children
    server.process.kill()
    assert server.process.wait(60) < 0
    assert psutil.wait_procs(children, 60)[1] == []


def test_when_vllm_dies_the_server_exits_so_that_it_is_started_again(started: dict[str, Started]) -> None:
    server = started["whole"]
    engine, children = family_of(server)
    engine.kill()
    assert server.process.wait(60) == 1
    assert "headway: vLLM has died" in server.log.read_text()
    assert psutil.wait_procs(children, 60)[1] == []


def test_what_vllm_has_no_kernels_for_is_said_in_one_line(started: dict[str, Started]) -> None:
    server = started["without kernels"]
    assert server.process.wait(600) == 1
    last = [line for line in server.log.read_text().splitlines() if line.startswith("headway: ")]
    assert len(last) == 1 and "vLLM has no kernels for this model" in last[0]
