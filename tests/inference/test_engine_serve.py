"""`headway serve` as a process: it binds, joins a run, stops when told to."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_common import publish

from headway.base.errors import UsageError
from headway.config.shared import RunSettings
from headway.core.runs import RunPaths
from headway.inference.serve import check_address
from headway.models.checkpoints.folders import load_model
from headway.monitor.runs import create_run
from headway.transport.control.tokens import find_token

NAMED = ("--inference.served_model_name", "my/own-name")


def headway(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headway.cli.main", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def get(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=60) as reply:
        body: dict[str, object] = json.loads(reply.read())
        return body


def generate(url: str, tokens: int, **fields: bool) -> int:
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": tokens, "ignore_eos": True}, **fields}
    with urllib.request.urlopen(f"{url}/inference/v1/generate", json.dumps(body).encode(), timeout=60) as reply:
        return len(json.loads(reply.read())["choices"][0]["token_ids"])


def test_a_server_joins_a_run_with_its_latest_weights_and_leaves_on_sigterm(taught: Path, tmp_path: Path) -> None:
    paths = create_run(RunSettings(name="run", output_dir=tmp_path), "test")
    (paths.control / "token").write_text("of-the-run")
    update = publish(paths.root, 5, load_model(taught))
    process = headway("serve", str(taught), "--port", "0", "--join", str(paths.root), "--name", "first", *NAMED)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "version 5" in line, process.stderr.read() if process.stderr and not line else line
        record = json.loads((paths.control / "engines" / "first.json").read_text())
        state = get(record["url"] + "/state")
        assert (state["version"], state["fingerprint"]) == (5, update.fingerprint)
        assert get(record["url"] + "/v1/models/my/own-name")["id"] == "my/own-name"
        with ThreadPoolExecutor() as pool:
            flight = pool.submit(generate, record["url"], 300)
            while get(record["url"] + "/state")["running"] == 0 and not flight.done():
                pass
            moving = pool.submit(generate, record["url"], 400, may_migrate=True)
            while get(record["url"] + "/state")["running"] != 2 and not (flight.done() or moving.done()):
                pass
            process.send_signal(signal.SIGTERM)
            assert moving.result() < 400, "what may go on elsewhere is handed over"
            assert flight.result() == 300, "what was in flight must end as it would have"
        assert process.wait(30) == 0
        assert not (paths.control / "engines" / "first.json").exists()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "no-such-model"), "neither a folder"),
        (("serve", "tiny", "--host", "0.0.0.0"), "HEADWAY_TOKEN"),
        (("serve", "tiny", "--join"), "--join: expected one argument"),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    process = headway(*arguments, "--port", "0", HEADWAY_TOKEN="") if "--join" not in arguments else headway(*arguments)
    _, errors = process.communicate(timeout=120)
    assert process.returncode in (1, 2)
    assert message in errors and errors.count("\n") == 1


def test_a_taken_port_is_said_plainly(taught: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = headway("serve", str(taught), "--port", str(taken.getsockname()[1]))
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "choose another --port" in errors


def test_tokens_and_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_TOKEN", raising=False)
    paths = RunPaths(tmp_path)
    assert find_token(None) is None and find_token(paths) is None
    paths.control.mkdir()
    (paths.control / "token").write_text("of-the-run\n")
    assert find_token(paths) == "of-the-run"
    monkeypatch.setenv("HEADWAY_TOKEN", "mine")
    assert find_token(paths) == "mine"
    for host in ("127.0.0.1", "::1", "localhost"):
        check_address(host, None)
    for host in ("0.0.0.0", "10.0.0.1", "::", "example.org"):
        check_address(host, "mine")
        with pytest.raises(UsageError):
            check_address(host, None)


def test_help_answers_without_torch() -> None:
    started = "import sys, headway.cli.main as m; m.run(['serve', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", started], capture_output=True, check=False).returncode == 0
