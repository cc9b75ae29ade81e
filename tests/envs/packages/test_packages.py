"""Environments as packages: the template, wheels, the index, the lock; all of it without installing anything here."""

import importlib
import json
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from headway.base.errors import HeadwayError, UsageError
from headway.cli.main import run
from headway.envs.packages import add
from headway.envs.packages.add import add_package
from headway.envs.packages.folder import read_package
from headway.envs.packages.index import IndexEntry, find_entry, publish_wheel, read_index
from headway.envs.packages.install import install_wheel
from headway.envs.packages.lock import LockedPackage, check_locked, read_lock, write_locked
from headway.envs.packages.template import write_template
from headway.envs.packages.versions import imported_versions
from headway.envs.packages.wheel import Wheel, build_wheel, read_wheel
from headway.envs.registry import load_environment

NAME = "word-vowels"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The template, as `headway env new` writes it."""
    return write_template(NAME, tmp_path_factory.mktemp("new"))


@pytest.fixture(scope="module")
def wheel(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return build_wheel(read_package(package), tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def index(wheel: Wheel, tmp_path: Path) -> Path:
    """An index with one package in it."""
    publish_wheel(wheel, tmp_path / "index")
    return tmp_path / "index"


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[Wheel]:
    """What would have been installed: the tests share their Python with everything else."""
    seen: list[Wheel] = []
    monkeypatch.setattr(add, "install_wheel", seen.append)
    return seen


def tamper(file: Path) -> None:
    """Put a line of code into a wheel, and keep it a wheel that pip would take."""
    with zipfile.ZipFile(file) as old:
        content = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(file, "w") as new:
        for name, data in content.items():
            new.writestr(name, data + (b"\nimport socket\n" if name.endswith("environment.py") else b""))


def test_a_wheel_says_what_it_brings(package: Path, wheel: Wheel) -> None:
    assert (wheel.name, wheel.version, wheel.modules) == (NAME, "0.1.0", ("word_vowels",))
    assert wheel.choices[NAME].id == "word_vowels.environment:WordVowels"
    assert "word_vowels/tasks.jsonl" in zipfile.ZipFile(wheel.file).namelist()
    assert not (package / "build").exists()


def test_a_package_of_an_index_is_installed_and_locked(index: Path, installs: list[Wheel], tmp_path: Path) -> None:
    lock = tmp_path / "environments.lock"
    added = add_package(NAME, lock, index=str(index))
    assert [(one.name, one.version) for one in installs] == [(NAME, "0.1.0")]
    (locked,) = read_lock(lock)
    assert locked == added
    assert (locked.version, locked.sha256, locked.environments) == ("0.1.0", installs[0].sha256, [NAME])
    assert locked.source == str(index / "word_vowels-0.1.0-py3-none-any.whl")


def test_a_tampered_package_is_refused_by_its_hash(index: Path, installs: list[Wheel], tmp_path: Path) -> None:
    lock = tmp_path / "environments.lock"
    tamper(index / "word_vowels-0.1.0-py3-none-any.whl")
    with pytest.raises(HeadwayError, match="is refused: its index says sha256"):
        add_package(NAME, lock, index=str(index))
    assert not installs and not lock.exists()


def test_a_lock_holds_against_an_index_that_was_changed_with_its_package(
    index: Path, installs: list[Wheel], tmp_path: Path
) -> None:
    lock = tmp_path / "environments.lock"
    add_package(NAME, lock, index=str(index))
    before = lock.read_bytes()
    tamper(index / "word_vowels-0.1.0-py3-none-any.whl")
    changed = read_wheel(index / "word_vowels-0.1.0-py3-none-any.whl")
    entry = IndexEntry(changed.name, changed.version, changed.file.name, changed.sha256)
    (index / "index.json").write_bytes(msgspec.json.encode({"packages": [entry]}))
    with pytest.raises(UsageError, match="nothing was installed"):
        add_package(NAME, lock, index=str(index))
    with pytest.raises(HeadwayError, match="is refused: it should have sha256"):
        add.add_locked(lock)
    assert len(installs) == 1 and lock.read_bytes() == before


@pytest.fixture
def server(index: Path) -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(index))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_address[1]}"
        serving.shutdown()


def test_any_web_server_serves_an_index(server: str, installs: list[Wheel], tmp_path: Path) -> None:
    lock = tmp_path / "environments.lock"
    added = add_package(f"{NAME}==0.1.0", lock, index=server)
    assert added.source == f"{server}/word_vowels-0.1.0-py3-none-any.whl"
    assert add.add_locked(lock) == [added]
    with pytest.raises(UsageError, match="the server answers 404"):
        add_package(NAME, lock, index=f"{server}/elsewhere")


def test_an_index_without_https_needs_the_hash_from_elsewhere(installs: list[Wheel], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no HTTPS"):
        add_package(NAME, tmp_path / "environments.lock", index="http://user:secret@example.org/index")
    assert not installs


def test_a_published_version_never_changes(wheel: Wheel, index: Path, tmp_path: Path) -> None:
    publish_wheel(wheel, index)  # the same again is fine
    changed = tmp_path / wheel.file.name
    shutil.copyfile(wheel.file, changed)
    tamper(changed)
    with pytest.raises(UsageError, match=r"raise `version` in pyproject\.toml"):
        publish_wheel(read_wheel(changed), index)
    assert [entry.sha256 for entry in read_index(str(index)).packages] == [wheel.sha256]


def test_the_newest_version_is_taken_unless_one_is_named(index: Path) -> None:
    found = read_index(str(index))
    found.packages += [IndexEntry(NAME, version, "x.whl", "0") for version in ("0.9.0", "0.10.0")]
    assert find_entry(found, NAME, "here").version == "0.10.0"
    assert find_entry(found, f"{NAME}==0.9.0", "here").version == "0.9.0"
    with pytest.raises(UsageError, match=r"it has word-vowels 0\.1\.0, 0\.9\.0"):
        find_entry(found, f"{NAME}==3", "here")
    with pytest.raises(UsageError, match='did you mean "word-vowels"'):
        find_entry(found, "word-vowel", "here")


def test_an_index_cannot_name_files_outside_of_itself(index: Path, installs: list[Wheel], tmp_path: Path) -> None:
    content = json.loads((index / "index.json").read_text())
    content["packages"][0]["file"] = "../secret.whl"
    (index / "index.json").write_text(json.dumps(content))
    with pytest.raises(HeadwayError, match="is no name of a wheel"):
        add_package(NAME, tmp_path / "environments.lock", index=str(index))


def test_what_needs_another_version_of_an_installed_package_is_refused(wheel: Wheel) -> None:
    from dataclasses import replace

    from packaging.requirements import Requirement

    with pytest.raises(UsageError, match=r"needs msgspec<0\.1, and msgspec .* is installed; nothing was changed"):
        install_wheel(replace(wheel, requires=(Requirement("msgspec<0.1"),)))
    with pytest.raises(UsageError, match="would install the module json, which another package has"):
        install_wheel(replace(wheel, modules=("json",)))


def test_a_repository_is_locked_with_its_commit_and_the_same_sources_make_the_same_bytes(
    package: Path, wheel: Wheel, installs: list[Wheel], tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(package, repository)
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "first")):
        subprocess.run(["git", "-C", str(repository), *words], check=True)
    added = add_package(f"git+{repository}", tmp_path / "environments.lock")
    head = subprocess.run(["git", "-C", str(repository), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert added.source == f"git+{repository}@{head.stdout.strip()}"
    assert added.sha256 == wheel.sha256


def test_a_run_is_refused_where_its_lock_names_other_code(tmp_path: Path) -> None:
    lock = tmp_path / "environments.lock"
    entry = LockedPackage("reasoning-gym", "0.0.1", "0" * 64, "x", [], {"reasoning_gym": "0" * 64})
    write_locked(lock, entry)
    check_locked([lock], ["json"])
    with pytest.raises(UsageError, match=r"locks reasoning-gym 0\.0\.1 .* and reasoning_gym 0\.1\.25 .* is installed"):
        check_locked([lock], ["reasoning_gym"])


VERIFIERS_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "packed-reverse"
version = "0.3.0"
dependencies = ["verifiers"]

[tool.setuptools]
py-modules = ["packed_reverse"]
"""


@pytest.mark.slow
def test_a_taskset_of_verifiers_is_published_added_and_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("verifiers")
    folder, index, site = tmp_path / "packed-reverse", str(tmp_path / "index"), tmp_path / "site"
    folder.mkdir()
    site.mkdir()
    (folder / "pyproject.toml").write_text(VERIFIERS_PROJECT)
    shutil.copy(Path(__file__).parents[1] / "tasksets" / "tiny_reverse_taskset.py", folder / "packed_reverse.py")
    # In place of pip, which would change the Python that all tests share.
    monkeypatch.setattr(add, "install_wheel", lambda wheel: zipfile.ZipFile(wheel.file).extractall(site))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(site)
    assert run(["env", "publish", str(folder), "--index", index]) == 0
    assert run(["env", "add", "packed-reverse", "--index", index]) == 0
    importlib.invalidate_caches()
    assert 'id = "verifiers", args = { taskset = "packed-reverse" }' in capsys.readouterr().out
    (locked,) = read_lock(tmp_path / "environments.lock")
    assert (locked.name, locked.version, locked.environments) == ("packed-reverse", "0.3.0", ["packed-reverse"])

    environment = load_environment("verifiers", {"taskset": "packed-reverse"})
    assert [task.data["answer"] for task in environment.tasks()] == ["dcba", "edcb", "fedc", "gfed"]
    (version,) = [one for one in imported_versions(environment.modules()) if one.package == "packed-reverse"]
    assert version.version == "0.3.0"
    check_locked([tmp_path / "environments.lock"], ["packed_reverse"])
    (site / "packed_reverse.py").write_text((site / "packed_reverse.py").read_text() + "# changed\n")
    with pytest.raises(UsageError, match=r"locks packed-reverse 0\.3\.0"):
        check_locked([tmp_path / "environments.lock"], ["packed_reverse"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("new", "Word Sums"), "is no name for a package"),
        (("new", "json"), "there is a module or an environment json already"),
        (("new", "wordle"), "there is a module or an environment wordle already"),
        (("check", "."), "has no pyproject.toml"),
        (("check", "reverse-txt"), 'did you mean "reverse-text"'),
        (("publish", "."), "--index FOLDER is missing"),
        (("add", "./nothing"), "there is no folder"),
        (("add",), "locks no package"),
        (("add", "x", "--index", "nowhere"), "cannot read index.json"),
    ],
)
def test_mistakes_are_one_line_with_what_to_do(
    words: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["env", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
