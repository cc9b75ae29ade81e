"""Task files of other projects, in their documented formats."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.base.errors import UsageError
from headway.envs.swe.loaders import load_tasks, read_tasks
from headway.envs.swe.swe import Swe

SWE_BENCH = {
    "repo": "astropy/astropy",
    "instance_id": "astropy__astropy-12907",
    "base_commit": "d16bfe05a744909de4b27f5875fe0d4ed41ce607",
    "patch": "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-a\n+b\n",
    "test_patch": "diff --git a/t.py b/t.py\n--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-a\n+b\n",
    "problem_statement": "Nested models are wrong.",
    "hints_text": "",
    "created_at": "2022-03-03T15:14:54Z",
    "version": "4.3",
    "FAIL_TO_PASS": '["t.py::test_a[x0]"]',
    "PASS_TO_PASS": '["t.py::test_b", "t.py::test_c"]',
    "environment_setup_commit": "298ccb478e6bf092953bca67a3d29dc6c35f6752",
}
SWE_SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "patch": "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-good\n+bad\n",
    "FAIL_TO_PASS": ["tests/t.py::A::test_a"],
    "PASS_TO_PASS": ["tests/t.py::A::test_b"],
    "created_at": "2025-04-01",
    "image_name": "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
    "problem_statement": "Refresh tokens fail.",
}
R2E = {
    "repo_name": "aiohttp",
    "docker_image": "namanjain12/aiohttp_final:f0d74880deec8fcd982bce639c93c5e130d41198",
    "commit_hash": "f0d74880deec8fcd982bce639c93c5e130d41198",
    "parsed_commit_content": "{}",
    "execution_result_content": json.dumps(
        {
            "test_file_names": ["test_1.py"],
            "test_file_codes": ["def test_a(): ..."],
            "old_commit_res_stdout": "FAILED r2e_tests/test_1.py::Some::test_a - x\nPASSED r2e_tests/test_1.py::test_b",
        }
    ),
    "expected_output_json": json.dumps({"Some.test_a": "PASSED", "test_b": "PASSED", "test_c": "FAILED"}),
    "problem_statement": "[ISSUE] Cookies are lost. [/ISSUE]",
    "prompt": "",
}


def read(tmp_path: Path, rows: list[dict[str, Any]], lines: bool = True) -> list[Any]:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows, indent=1))
    return read_tasks(path)


@pytest.mark.parametrize("lines", [True, False])
def test_fields_are_mapped(tmp_path: Path, lines: bool) -> None:
    bench, smith, gym = read(tmp_path, [SWE_BENCH, SWE_SMITH, R2E], lines)
    assert bench.image == "swebench/sweb.eval.x86_64.astropy_1776_astropy-12907:latest"
    assert bench.fail_to_pass == ["t.py::test_a[x0]"] and bench.pass_to_pass == ["t.py::test_b", "t.py::test_c"]
    assert (bench.patch, bench.test_patch) == (SWE_BENCH["patch"], SWE_BENCH["test_patch"])
    assert bench.commit == SWE_BENCH["base_commit"] and bench.folder == "/testbed"
    assert smith.image == SWE_SMITH["image_name"] and smith.bug_patch == SWE_SMITH["patch"] and not smith.patch
    assert smith.fail_to_pass == ["tests/t.py::A::test_a"] and smith.issue == "Refresh tokens fail."
    assert gym.id == "aiohttp.f0d74880deec" and gym.image == R2E["docker_image"]
    assert gym.fail_to_pass == ["Some.test_a"] and gym.pass_to_pass == ["test_b"]
    assert gym.test_files == {"r2e_tests/test_1.py": "def test_a(): ..."}


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"FAIL_TO_PASS": "{}"}, "list of names"), ({"FAIL_TO_PASS": "[1"}, "task 1"), ({"patch": None}, "patch")],
)
def test_bad_rows_are_refused_by_number(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    row = {key: value for key, value in {**SWE_BENCH, **change}.items() if value is not None}
    with pytest.raises(UsageError, match=reason):
        read(tmp_path, [row])


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("no json")
    with pytest.raises(UsageError, match="JSON list or JSON lines"):
        load_tasks(str(tmp_path / "x.jsonl"))
    with pytest.raises(UsageError, match="swe make"):
        load_tasks(str(tmp_path / "nothing"))


def test_tasks_in_images_say_that_they_need_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(tmp_path, [SWE_BENCH])
    environment = Swe(tasks=str(tmp_path / "tasks.jsonl"))
    assert environment.tasks()[0].data["issue"] == "Nested models are wrong."
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"12907 needs its container image: .* apt-get install podman"):
        environment.check()


def test_tests_that_are_not_of_pytest_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(tmp_path, [SWE_BENCH | {"FAIL_TO_PASS": '["test_it (forms.tests.Fields)"]'}])
    monkeypatch.setattr("headway.envs.swe.images.backend_class", lambda kind: None)
    with pytest.raises(UsageError, match=r"12907: the test 'test_it \(forms.tests.Fields\)' is not pytest's"):
        Swe(tasks=str(tmp_path / "tasks.jsonl")).check()
