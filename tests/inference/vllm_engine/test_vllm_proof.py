"""vLLM proves what it serves: a model with tied heads and experts, weights that are sometimes forgotten.

One server for all tests of this module; each takes over versions that it makes itself.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from forgetful_workers import FORGET
from proof_helpers import Updates
from vllm_here import ON_GPU, TOLERANCE, vllm_flags

from headway.core.protocol import WeightUpdate

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "tiny-moe"
IDS = [7, 99, 23, 150, 4, 61, 200, 33, 18, 72, 5, 140]
TOKEN = "secret"
ON_CPU_ALONE = pytest.mark.skipif(ON_GPU, reason="only the CPU build packs copies")
PLACES, LONG = 8, 480
"""Sequences that the server runs at once, and tokens that outlast an update by far."""


@dataclass
class Server:
    url: str
    forget: Path
    process: "subprocess.Popen[bytes]"
    log: Path

    def post(self, route: str, body: Any) -> tuple[int, Any]:
        headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
        request = urllib.request.Request(f"{self.url}{route}", msgspec.json.encode(body), headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def get(self, route: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{route}", timeout=60) as reply:
            return json.loads(reply.read())

    def logprobs(self) -> torch.Tensor:
        """Served logprobs of `IDS[1:]`."""
        sampling = {"max_tokens": 1, "prompt_logprobs": 0}
        status, reply = self.post("/inference/v1/generate", {"token_ids": IDS, "sampling_params": sampling})
        assert status == 200, reply
        return torch.tensor([entry["logprob"] for entry in reply["prompt_logprobs"][1:]])

    def update(self, update: WeightUpdate, *, forgetting: str = "") -> tuple[int, Any]:
        self.forget.write_text(forgetting)
        return self.post("/weights", update)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("proof")
    forget, log = folder / "forget", folder / "log"
    forget.write_text("")
    command = [sys.executable, "-m", "headway.cli.main", "serve", MODEL, "--engine", "vllm", "--port", "0"]
    command += ["--seq_len", "512", "--inference.threads", "1", "--inference.max_running", str(PLACES)]
    command += ["--inference.vllm.worker_extension_cls", "forgetful_workers.ForgetfulWorker", *vllm_flags()]
    here = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    paths = {"PYTHONPATH": here, FORGET: str(forget)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | paths | {"HEADWAY_TOKEN": TOKEN}
        )
    while (found := re.search(r"at (http://\S+) \(version", log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        time.sleep(0.2)
    yield Server(found[1], forget, process, log)
    process.terminate()
    process.wait(60)


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Updates]:
    with Updates(tmp_path_factory.mktemp("updates"), MODEL) as updates:
        yield updates


def of_transformers(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(IDS)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]


def test_a_whole_version_is_taken_and_serves_what_transformers_computes(
    server: Server, updates: Updates, tmp_path: Path
) -> None:
    update = updates.next()
    status, reply = server.update(update)
    assert (status, reply["version"]) == (200, update.version), reply
    expected = of_transformers(updates.save(tmp_path / "hf"))
    assert float((server.logprobs() - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("forgotten", "suspect"),
    [
        pytest.param("heads", "the head is suspect", marks=ON_CPU_ALONE),
        pytest.param("experts", "layer 0 is suspect", marks=ON_CPU_ALONE),
        ("model.embed_tokens.weight", "the embedding is suspect"),
        ("model.layers.1.self_attn.o_proj.weight", "layer 1 is suspect"),
        ("model.norm.weight", "the final norm is suspect"),
    ],
)
def test_what_was_forgotten_is_noticed_and_the_old_version_serves_on(
    server: Server, updates: Updates, forgotten: str, suspect: str
) -> None:
    good = updates.next()
    assert server.update(good)[0] == 200
    before = server.logprobs()
    bad = updates.next()
    status, reply = server.update(bad, forgetting=forgotten)
    assert status == 409, reply
    assert f"version {bad.version} was refused" in reply["error"]["message"]
    assert suspect in reply["error"]["message"]
    assert server.get("/state")["version"] == good.version
    assert server.get("/health") == {"status": "ok"}
    assert torch.equal(server.logprobs(), before)
    # The same version is taken as soon as nothing is forgotten.
    assert server.update(bad)[0] == 200
    assert server.get("/state")["fingerprint"] == bad.fingerprint
    assert not torch.equal(server.logprobs(), before)


def test_no_token_of_a_refused_version_leaves_the_server(server: Server, updates: Updates) -> None:
    assert server.update(updates.next())[0] == 200
    version = server.get("/state")["version"]
    with in_flight(server, 2) as replies:
        assert server.update(updates.next(), forgetting="model.norm.weight")[0] == 409
    assert [status for status, _ in replies] == [500, 500]
    assert all("were refused; try again" in reply["error"]["message"] for _, reply in replies)
    status, reply = server.post("/inference/v1/generate", generation(3))
    assert (status, reply["choices"][0]["versions"]) == (200, [[version, 3]])


@pytest.mark.parametrize("requests", [3, PLACES])
def test_requests_in_flight_go_on_over_a_version_that_is_proven(
    server: Server, updates: Updates, requests: int
) -> None:
    """Even where the engine has no place left, the probe need not wait for one of them to end."""
    version = server.get("/state")["version"]
    update = updates.next()
    with in_flight(server, requests) as replies:
        assert server.update(update)[0] == 200
        assert server.get("/state")["running"] == requests
    assert [status for status, _ in replies] == [200] * requests
    for _, reply in replies:
        (old, before), (new, after) = reply["choices"][0]["versions"]
        assert (old, new, before + after) == (version, update.version, LONG)


def test_a_version_without_a_probe_is_taken_on_its_fingerprint(server: Server, updates: Updates) -> None:
    update = msgspec.structs.replace(updates.next(), probe=None)
    assert server.update(update, forgetting="model.norm.weight")[0] == 200
    assert server.update(updates.next())[0] == 200


def test_an_engine_that_cannot_go_back_says_so_and_ends(server: Server, updates: Updates) -> None:
    """The last test: it costs the server."""
    assert server.update(updates.next())[0] == 200
    family = psutil.Process(server.process.pid).children(recursive=True)
    status, reply = server.update(updates.next(), forgetting="model.norm.weight\nmodel.embed_tokens.weight")
    assert status == 409 and "lost its weights" in reply["error"]["message"]
    assert server.process.wait(60) == 1
    assert "headway: vLLM lost its weights" in server.log.read_text()
    until(lambda: not any(process.is_running() and process.status() != "zombie" for process in family))


def generation(tokens: int) -> dict[str, Any]:
    return {"token_ids": IDS, "sampling_params": {"max_tokens": tokens, "ignore_eos": True}}


@contextmanager
def in_flight(server: Server, requests: int) -> Iterator[list[tuple[int, Any]]]:
    """Long requests that run inside; their replies once it is over."""
    replies: list[tuple[int, Any]] = []

    def ask() -> None:
        replies.append(server.post("/inference/v1/generate", generation(LONG)))

    threads = [threading.Thread(target=ask) for _ in range(requests)]
    for thread in threads:
        thread.start()
    until(lambda: server.get("/state")["running"] == requests)
    yield replies
    for thread in threads:
        thread.join()


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.05)
