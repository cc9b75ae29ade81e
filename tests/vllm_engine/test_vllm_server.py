"""`headway serve` with vLLM that ends badly: what it says, and that it leaves nothing behind."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from engine_serving import VllmServer, start_vllm, vllm_server
from vllm_harness import TIED, make

from headway.models.checkpoint import save_checkpoint
from headway.models.config import ModelConfig
from headway.rendering.tiny import save_tiny_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def checkpoint(folder: Path, config: ModelConfig) -> Path:
    files = folder / "files"
    files.mkdir()
    vocab = save_tiny_tokenizer(files)
    save_checkpoint(make(replace(config, vocab_size=vocab), 0), folder / "model", files_from=files)
    return folder / "model"


@pytest.fixture
def server(tmp_path: Path) -> VllmServer:
    folder = checkpoint(tmp_path, TIED)
    return vllm_server(start_vllm(folder, tmp_path / "log"), folder, tmp_path / "log")


def engine_of(server: VllmServer) -> psutil.Process:
    """vLLM's own process."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child for child in children if "EngineCore" in " ".join(child.cmdline()) + child.name())


def test_a_killed_server_takes_vllm_along(server: VllmServer) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert engine_of(server) in children
    server.process.kill()
    assert server.process.wait(60) < 0
    assert psutil.wait_procs(children, 60)[1] == []


def test_when_vllm_dies_the_server_exits_so_that_it_is_started_again(server: VllmServer) -> None:
    engine_of(server).kill()
    assert server.process.wait(60) == 1
    assert "headway: vLLM has died" in server.log.read_text()


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (replace(TIED, head_dim=8), [], "vLLM has no kernels for this model"),
        (TIED, ["--inference.vllm.max_num_seq", "3"], "did you mean max_num_seqs?"),
        (TIED, ["--inference.vllm.block_size", "-1"], "vLLM cannot serve model: "),
    ],
)
def test_what_vllm_cannot_serve_is_said_in_one_line(
    tmp_path: Path, config: ModelConfig, options: list[str], message: str
) -> None:
    folder = checkpoint(tmp_path, config)
    process = start_vllm(folder, tmp_path / "log", *options)
    assert process.wait(600) in (1, 2)
    last = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("headway: ")]
    assert len(last) == 1 and message in last[0]
