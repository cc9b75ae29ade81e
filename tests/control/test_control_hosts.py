"""A run over two hosts with TLS: network namespaces, whose packets are read and whose link is cut."""

import json
import os
import random
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from control_helpers import ROUTES, SMALL_RUN, check_malformed, malformed

from headway.core.control import LEASE_SECONDS
from headway.core.runs import RunPaths
from headway.transport.control.client import ControlClient
from headway.transport.control.folder import FolderControl
from namespaces import Capture, Host, Network, make_certificates, missing, network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.skipif(bool(missing()), reason=str(missing()))]

TOKEN = "this-token-must-not-be-on-the-wire"
WRONG = "this-wrong-token-neither"
IN_CLEAR = "this-is-sent-in-clear"
STEPS = 60
"""A step takes a quarter of a second, and the link is to be cut some seconds after the second one."""


@pytest.fixture
def net() -> Iterator[Network]:
    with network(2) as made:
        yield made


def start(host: Host, folder: Path, authority: Path, *arguments: str) -> "subprocess.Popen[str]":
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HEADWAY_TOKEN": TOKEN, "HEADWAY_CA_FILE": str(authority)}
    certificate = authority.with_name(f"{host.name}.pem")
    tls = ["--tls.certificate", str(certificate), "--tls.key", str(certificate.with_suffix(".key"))]
    command = host.enter(sys.executable, "-m", "headway.cli.main", *arguments, *tls)
    pipe, out = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=out, text=True)


def end(process: "subprocess.Popen[str]") -> None:
    """End a process, and with it those that it started."""
    process.kill()
    process.communicate()


def wait_until(true: Callable[[], bool], what: str, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s"
        time.sleep(0.2)


def ask(url: str, method: str, token: str | None, trust: ssl.SSLContext, body: bytes | None = None) -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, data=body, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60, context=trust) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_run_over_two_hosts_keeps_its_token_and_outlives_a_cut_link(
    net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rl.toml").write_text(SMALL_RUN.format(steps=STEPS))
    with Capture(net.bridge) as capture, ExitStack() as stack:
        first, second = net.hosts
        authority = make_certificates(tmp_path / "certificates", net.hosts)
        url = f"https://{first.address}:8500"
        here = ["--run.name", "run", "--only", "orchestrator,trainer", "--control.host", first.address]
        head = start(first, tmp_path / "head", authority, "rl", "@", str(tmp_path / "rl.toml"), *here)
        engine = start(second, tmp_path / "engine", authority, "serve", "--run", url, "--name", "far")
        for process in (head, engine):
            stack.callback(end, process)
        paths = RunPaths(tmp_path / "head" / "outputs" / "run")

        def step() -> int:
            file = paths.metrics / "trainer.jsonl"
            return len(file.read_text().splitlines()) if file.exists() else 0

        wait_until(lambda: step() >= 2 or head.poll() is not None, "step 2")
        assert head.poll() is None, head.communicate()[0]
        trust = ssl.create_default_context(cafile=str(authority))
        update = FolderControl(paths).latest()
        assert update is not None and update.transport["urls"][0].startswith(f"https://{first.address}:")
        for token in (None, WRONG):
            seen = {ask(url + route, method, token, trust, b"{}") for method, route in ROUTES}
            weights = f"{update.transport['urls'][0]}/v1/versions/{update.version}"
            seen |= {ask(weights + name, "GET", token, trust) for name in ("", "/manifest.json", "/nothing")}
            [address] = FolderControl(paths).engines().values()
            admin = [("POST", "/weights"), ("POST", "/pause"), ("POST", "/adapters"), ("DELETE", "/adapters/a")]
            seen |= {ask(address + route, method, token, trust, b"{}") for method, route in admin}
            assert seen == {401}
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            ask(url, "GET", None, ssl.create_default_context())

        second.cut()
        cut_at = time.monotonic()
        monkeypatch.setenv("HEADWAY_CA_FILE", str(authority))
        for message in malformed(1000, random.Random(1)):
            check_malformed(message, ask(url + message.route, message.method, TOKEN, trust, message.body))
        status = ControlClient(url, TOKEN).status()
        assert {member.name for member in status.members} <= {"far"} and set(status.engines) <= {"far"}
        assert FolderControl(paths).latest() is not None and not status.stop and not status.finished
        time.sleep(max(0.0, cut_at + LEASE_SECONDS + 3 - time.monotonic()))
        assert FolderControl(paths).engines() == {}, "nobody heard of the engine for longer than its lease"
        assert step() < STEPS
        second.heal()
        outputs = [process.communicate(timeout=200)[0] for process in (head, engine)]
        assert [head.returncode, engine.returncode] == [0, 0], outputs
        send = f"echo {IN_CLEAR} > /dev/udp/{net.address}/9"
        subprocess.run(first.enter("bash", "-c", send), check=True)
        wait_until(lambda: capture.holds(IN_CLEAR.encode()), "seeing what is sent in clear", 20)
    steps = [json.loads(line)["step"] for line in (paths.metrics / "trainer.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1)), "each step trained once"
    assert capture.size > 1 << 20
    for secret in (TOKEN, WRONG):
        assert not capture.holds(secret.encode())
    assert not any(TOKEN in output for output in outputs)


def test_the_doctor_tries_the_hosts_of_a_run_before_it_starts(net: Network) -> None:
    first, second = net.hosts
    check = [sys.executable, "-m", "headway.cli.main", "doctor", "--json", "--deployment", f"{first.address}:8500"]
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen(host.enter(*check, "--hosts", "2"), stdout=pipe, stderr=pipe, text=True)
        for host in (second, first)
    ]
    outputs = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    found = {finding["subject"]: finding["text"] for finding in json.loads(outputs[0][0])}
    assert first.address in found["hosts"] and second.address in found["hosts"]
    assert found["interfaces"].count("eth0") == 2 and "GB/s" in found["gloo"] and found["clocks"].startswith("within")
    second.cut()
    alone = subprocess.run(
        second.enter(*check, "--hosts", "2", "--wait", "5"), capture_output=True, text=True, timeout=200
    )
    assert alone.returncode == 1 and "nobody answers" in alone.stderr and "Traceback" not in alone.stderr
