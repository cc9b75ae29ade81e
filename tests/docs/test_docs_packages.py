"""The walk-through of docs/packages.md, in a fresh environment of Python: from nothing to a run, and a next version."""

import json
import os
import shlex
import site
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT, blocks

PAGE = ROOT / "docs" / "packages.md"


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """The folder of programs of a new environment, which sees the packages of this one and has none of its own."""
    folder = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    lines = [f"import site; site.addsitedir({place!r})" for place in site.getsitepackages()]
    (packages / "shared.pth").write_text("\n".join(lines) + "\n")
    program = folder / "bin" / "headway"
    program.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m headway.cli.main "$@"\n')
    program.chmod(0o755)
    return folder / "bin"


def shell(fresh: Path, folder: Path, command: str) -> "subprocess.CompletedProcess[str]":
    variables = {
        **os.environ,
        "PATH": f"{fresh}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "HEADWAY_CACHE": str(folder / "cache"),
        "PIP_NO_INDEX": "1",  # nothing is downloaded
    }
    return subprocess.run(
        ["sh", "-ec", command], cwd=folder, env=variables, stdout=-1, stderr=subprocess.STDOUT, text=True
    )


def recorded(run: Path) -> dict[str, str]:
    environments = json.loads((run / "environments.json").read_text())["environments"]
    return {env["name"]: env["code"][0]["version"] for env in environments}


def trained_steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics" / "trainer.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_walk_through_ends_in_a_run_and_another_version_is_refused(fresh: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    walk = blocks(PAGE, "bash")[0]
    # A smaller batch: what counts here is that it trains, not how well.
    small = walk.replace("--max_steps 3", "--max_steps 2 --orchestrator.batch_size 16")
    assert small != walk
    done = shell(fresh, work, small)
    assert done.returncode == 0, done.stdout[-6000:]
    run = work / "outputs" / "first"
    assert trained_steps(run) == [1, 2]
    assert recorded(run) == {"word-vowels": "0.1.0", "held-out": "0.1.0"}
    assert not list((work / "word-vowels").glob("build"))

    project = work / "word-vowels" / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "0.1.0"', 'version = "0.2.0"'))
    added = shell(
        fresh, work, "headway env publish ./word-vowels --index index; headway env add word-vowels --index index"
    )
    assert added.returncode == 0 and "word-vowels 0.2.0 is installed" in added.stdout, added.stdout
    resume = f"headway rl --resume {shlex.quote(str(run))} --max_steps 3"
    refused = shell(fresh, work, resume)
    assert refused.returncode != 0
    for part in ("word-vowels 0.1.0 (sha256", "word-vowels 0.2.0 (sha256", "--accept-changed-envs"):
        assert part in refused.stdout, refused.stdout[-6000:]
    assert trained_steps(run) == [1, 2]

    accepted = shell(fresh, work, f"{resume} --accept-changed-envs")
    assert accepted.returncode == 0, accepted.stdout[-6000:]
    assert (trained_steps(run), recorded(run)["word-vowels"]) == ([1, 2, 3], "0.2.0")


def test_the_example_of_playing_runs() -> None:
    for block in blocks(PAGE, "python"):
        exec(block, {})
