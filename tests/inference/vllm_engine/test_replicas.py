"""Several engines from one command: real servers that are really killed, and a real router where one is installed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.base.errors import UsageError
from headway.base.processes import consecutive_ports, free_port
from headway.config.shared import RunSettings
from headway.launch.placement import place_engines
from headway.launch.replicas import find_router, plan_addresses
from headway.monitor.runs import create_run


def test_a_router_takes_the_port_and_engines_the_ones_after_it() -> None:
    with_router = plan_addresses("127.0.0.1", 0, 2, router=True)
    assert with_router.router is not None and len({with_router.router, *with_router.engines}) == 3
    first = _free_row(4)
    assert plan_addresses("127.0.0.1", first, 3, router=True).engines == [first + 1, first + 2, first + 3]
    alone = plan_addresses("127.0.0.1", first, 3, router=False)
    assert (alone.engines, alone.router) == ([first, first + 1, first + 2], None)


def test_a_port_in_use_and_no_engines_at_all_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="choose another --port"):
        plan_addresses("127.0.0.1", taken.getsockname()[1], 1, router=False)
    with pytest.raises(UsageError, match="free ones in a row"):
        consecutive_ports("127.0.0.1", 65535, 2)
    with pytest.raises(UsageError, match="at least 1"):
        plan_addresses("127.0.0.1", 0, 0, router=False)


@given(count=st.integers(1, 9), gpus=st.integers(0, 16), cores=st.integers(1, 64), each=st.integers(1, 4))
def test_engines_share_nothing_where_there_is_enough(count: int, gpus: int, cores: int, each: int) -> None:
    names = [str(gpu) for gpu in range(gpus)]
    if 0 < gpus < count * each and each > 1:
        with pytest.raises(UsageError, match="GPUs"):
            place_engines(count, names, cores, each)
        return
    placed = place_engines(count, names, cores, each)
    assert len(placed) == count
    if gpus:
        seen = [gpu for one in placed for gpu in one["CUDA_VISIBLE_DEVICES"].split(",")]
        assert set(seen) <= set(names) and len(seen) == count * each
        assert gpus < count * each or len(set(seen)) == len(seen)
    else:
        assert all(int(one["OMP_NUM_THREADS"]) in (1, cores // count) for one in placed)


def test_engines_join_a_run_come_back_after_a_kill_and_end_with_their_parent(tmp_path: Path) -> None:
    run = create_run(RunSettings(name="run", output_dir=tmp_path), "rl")
    with replicas("--join", str(run.root)) as (server, line):
        urls = re.findall(r"http://\S+\d", line)
        assert len(urls) == 2 and all(get(url, "/health")["status"] == "ok" for url in urls)
        joined = {file.stem: json.loads(file.read_bytes()) for file in (run.control / "engines").iterdir()}
        assert {name: engine["url"] for name, engine in joined.items()} == {
            "replica-0": urls[0],
            "replica-1": urls[1],
        }
        assert generate(urls[1])["choices"][0]["token_ids"]

        family = psutil.Process(server.pid).children(recursive=True)
        os.kill(joined["replica-0"]["pid"], signal.SIGKILL)
        until(lambda: registered(run.control / "engines" / "replica-0.json") != joined["replica-0"] and serves(urls[0]))
        assert generate(urls[0])["choices"][0]["token_ids"]
        assert (run.logs / "replica-0_002.log").is_file() and not (run.logs / "replica-1_002.log").exists()

        family += psutil.Process(server.pid).children(recursive=True)
        server.kill()
        until(lambda: not any(process.is_running() and process.status() != "zombie" for process in family))


def test_engines_end_when_they_are_asked_to() -> None:
    with replicas("--no-router") as (server, line):
        family = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        assert server.wait(60) == 0
        assert len(re.findall(r"http://", line)) == 2
        assert not any(process.is_running() for process in family)


@pytest.mark.parametrize("number", ["none", "0"])
def test_a_number_that_is_none_is_refused(number: str) -> None:
    command = [sys.executable, "-m", "headway.cli.main", "serve", "tiny", "--port", "0", "--replicas", number]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == UsageError.exit_code and "--replicas" in ended.stderr


@pytest.mark.skipif(find_router() is None, reason="needs the extra router (vllm-router)")
def test_a_session_stays_with_one_engine() -> None:
    with replicas() as (_, line):
        router, *engines = re.findall(r"http://\S+\d", line)
        for session in ("a", "b", "c", "d"):
            before = [generated(url) for url in engines]
            for _ in range(3):
                generate(router, session)
            grown = [generated(url) - count for url, count in zip(engines, before, strict=True)]
            assert sorted(grown) == [0, 12]


@contextmanager
def replicas(*options: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Two engines of the smallest model while they serve, and the line that says where."""
    command = [sys.executable, "-u", "-m", "headway.cli.main", "serve", "tiny", "--replicas", "2", "--port", "0"]
    small = ["--engine", "embedded", "--seq_len", "64", "--inference.max_running", "4"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    server = subprocess.Popen([*command, *small, *options], env=environment, **pipes)
    assert server.stdout is not None
    said = []
    try:
        for line in server.stdout:
            said.append(line)
            if line.startswith("serving at"):
                yield server, line
                break
        else:
            raise AssertionError("".join(said))
    finally:
        server.terminate()
        server.wait(60)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.1)


def get(url: str, route: str) -> Any:
    with urllib.request.urlopen(f"{url}{route}", timeout=60) as reply:
        return json.loads(reply.read())


def serves(url: str) -> bool:
    try:
        return bool(get(url, "/health")["status"] == "ok")
    except (urllib.error.URLError, OSError):
        return False


def registered(file: Path) -> Any:
    return json.loads(file.read_bytes())


def generate(url: str, session: str = "") -> Any:
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    headers = {"content-type": "application/json", "x-session-id": session}
    request = urllib.request.Request(f"{url}/inference/v1/generate", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


def generated(url: str) -> int:
    return int(get(url, "/state")["generated_tokens"])


def _free_row(count: int) -> int:
    """The first of `count` ports in a row that are free."""
    while True:
        first = free_port("127.0.0.1")
        try:
            consecutive_ports("127.0.0.1", first, count)
        except UsageError:
            continue
        return first
