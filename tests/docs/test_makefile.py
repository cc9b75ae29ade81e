"""The Makefile on machines that lack something: a clear line, and no half-made environment."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = "#!/bin/sh\nexit 1\n"
WITHOUT_VENV = '#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexit 0\n'


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what the set-up looks at."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [shutil.which("make") or "make", *arguments]
    # What the make that runs these tests was given, such as PYTHON=..., is not for this one.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=inherited | environment)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (OLD, "python is too old: Headway needs Python 3.11 or newer"),
        (WITHOUT_VENV, "python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"),
    ],
)
def test_a_python_that_will_not_do_is_named(script: str, message: str, clone: Path) -> None:
    python = clone / "python"
    python.write_text(script)
    python.chmod(0o755)
    done = make(clone, "setup", f"PYTHON={python}")
    assert done.returncode == 2
    assert message in done.stderr
    assert not (clone / ".venv").exists()


def test_no_python_at_all_is_said(clone: Path) -> None:
    done = make(clone, "setup", PATH=str(clone), PYTHON="")
    assert "Headway needs Python 3.11 or newer" in done.stderr


def test_only_a_change_of_dependencies_installs_again(clone: Path) -> None:
    (clone / ".venv" / "bin").mkdir(parents=True)
    for name in ("bin/python", ".ready", ".ready-dev"):
        (clone / ".venv" / name).touch()
    assert "pip" not in make(clone, "--dry-run", "setup", "setup-dev").stdout
    newer = (clone / ".venv" / ".ready-dev").stat().st_mtime + 10
    os.utime(clone / "constraints.txt", (newer, newer))
    assert "pip" in make(clone, "--dry-run", "setup", "setup-dev").stdout


def test_options_of_pip_reach_torch_alone(clone: Path) -> None:
    lines = make(clone, "--dry-run", "setup", "TORCH_OPTIONS=--index-url cpu").stdout.splitlines()
    assert [line.partition(" install ")[2] for line in lines if "--index-url cpu" in line] == [
        "--no-compile --index-url cpu torch==2.13.0"
    ]


def test_help_names_every_target_a_newcomer_needs(clone: Path) -> None:
    text = make(clone).stdout
    for target in ("quickstart", "test", "test-slow", "lint", "bench", "clean"):
        assert f"make {target} " in text


def test_processes_may_keep_what_they_compile(clone: Path) -> None:
    done = make(clone, "--eval", "show:; @env", "show", PYTHONDONTWRITEBYTECODE="1")
    assert "PATH=" in done.stdout and "PYTHONDONTWRITEBYTECODE" not in done.stdout
