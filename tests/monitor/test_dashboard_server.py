"""The server: its answers, what it refuses, and that it says when a run has grown."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from run_folders import HOSTILE, add_step, make_run, rollout, write_rollouts

from headway.base.errors import HeadwayError, UsageError
from headway.cli.dash import parse
from headway.core.image_files import ImageFiles
from headway.core.images import image_digest
from headway.monitor.dashboard import start_in_thread


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    outputs = tmp_path_factory.mktemp("outputs")
    folder = make_run(outputs, steps=20)
    write_rollouts(folder, 1, [rollout(1, say=HOSTILE)])
    (folder / "control").mkdir()
    (folder / "control" / "token").write_text("secret")
    (folder / "logs" / "trainer_001.log").write_text("hello\n")
    (outputs / "not-a-run").mkdir()
    (outputs.parent / "outside").mkdir(exist_ok=True)
    (outputs.parent / "outside" / "run.json").write_text("{}")
    (outputs / "link").symlink_to(outputs.parent / "outside")
    yield outputs, start_in_thread(outputs)


def fetch(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def get(url: str) -> Any:
    status, _, body = fetch(url)
    assert status == 200, body
    return json.loads(body)


def test_runs_are_listed_and_links_are_not_followed(served: tuple[Path, str]) -> None:
    assert [run["name"] for run in get(served[1] + "api/runs")["runs"]] == ["made"]


def test_images_are_served_as_images_alone(served: tuple[Path, str]) -> None:
    picture, page = b"\x89PNG\r\n\x1a\nbytes", b"<script>alert(1)</script>"
    names = [image_digest(data) for data in (picture, page)]
    ImageFiles(served[0] / "made" / "images").keep(dict(zip(names, (picture, page), strict=True)))
    at = served[1] + "api/runs/made/images/"
    status, headers, body = fetch(at + names[0])
    assert (status, body) == (200, picture)
    assert headers["Content-Type"] == "image/png" and headers["X-Content-Type-Options"] == "nosniff"
    wrong = (names[1], "0" * 32, "0" * 31, "..%2f..%2fcontrol%2ftoken")
    assert [fetch(at + name)[0] for name in wrong] == [404] * 4


def test_series_are_thinned_and_cut(served: tuple[Path, str]) -> None:
    run = served[1] + "api/runs/made"
    answer = get(
        run + "/series?name=trainer:loss&name=orchestrator:reward/mean&name=trainer:none&points=6&from=5&to=20"
    )
    assert len(answer["trainer"]["step"]) == 6 and answer["trainer"]["step"][0] == 5
    assert answer["trainer"]["columns"]["loss"][0] == 0.2
    assert list(answer["trainer"]["columns"]) == ["loss"]


def test_headers_are_strict_on_every_answer(served: tuple[Path, str]) -> None:
    for path in ("", "static/app.js", "api/runs", "api/runs/none", "nowhere"):
        _, headers, _ = fetch(served[1] + path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "api/runs/..%2f..%2f", "api/runs/%2e%2e", "api/runs/link", "api/runs/not-a-run", "api/runs/outside",
        "api/runs/made/logs/..%2fcontrol%2ftoken", "api/runs/made/logs/%2e%2e/run.json", "api/runs/made/control/token",
        "static/..%2f..%2fserver.py", "static/../server.py", "static//etc/passwd", "api/runs/made/rollouts/1/99",
        "api/runs/made/rollouts/-1/0", "api/runs/made/rollouts/1/0/tokens?branch=9",
    ],
)  # fmt: skip
def test_what_is_not_served_is_not_found(served: tuple[Path, str], path: str) -> None:
    status, _, body = fetch(served[1] + path)
    assert status == 404 and b"secret" not in body


def test_wrong_parameters_and_methods_are_refused(served: tuple[Path, str]) -> None:
    assert fetch(served[1] + "api/runs/made/rollouts?sort=__class__")[0] == 400
    assert fetch(served[1] + "api/runs/made/series?points=many")[0] == 400
    request = urllib.request.Request(served[1] + "api/runs", method="POST", data=b"{}")
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(request)


def test_another_host_name_is_refused(served: tuple[Path, str]) -> None:
    assert fetch(served[1] + "api/runs", Host="evil.example")[0] == 403
    assert fetch(served[1] + "api/runs", Host="localhost:1234")[0] == 200
    assert fetch(served[1] + "api/runs", Host="[::1]:1234")[0] == 200


def test_the_page_names_nothing_outside(served: tuple[Path, str]) -> None:
    page = fetch(served[1])[2].decode()
    assert "http" not in page and "<script>" not in page and " style=" not in page


def test_a_change_is_told_to_whoever_listens(served: tuple[Path, str]) -> None:
    outputs, url = served

    async def listen() -> list[str]:
        async with aiohttp.ClientSession() as session, session.get(url + "api/events") as stream:
            await stream.content.readuntil(b"\n\n")
            add_step(outputs / "made", 21)
            said = await asyncio.wait_for(stream.content.readuntil(b"\n\n"), 120)
            return json.loads(said.removeprefix(b"data: "))

    assert asyncio.run(listen()) == ["made"]
    assert get(url + "api/runs/made")["processes"]["trainer"]["rows"] == 21


def test_a_single_run_can_be_served(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1)
    assert [run["name"] for run in get(start_in_thread(folder) + "api/runs")["runs"]] == ["made"]


def test_a_taken_port_is_said(served: tuple[Path, str]) -> None:
    port = int(served[1].rstrip("/").rpartition(":")[2])
    with pytest.raises(HeadwayError, match="choose another --port"):
        start_in_thread(served[0], port)


def test_the_command_line_is_checked(tmp_path: Path) -> None:
    assert parse([str(tmp_path), "--port=0", "--host", "localhost"]) == (tmp_path, "localhost", 0)
    for wrong in (["--port", "x"], ["--port"], [str(tmp_path / "none")], [str(tmp_path), "more"], ["--what"]):
        with pytest.raises(UsageError):
            parse(wrong)
