"""Every command and every TOML block of the documentation is accepted by the parser that reads it."""

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_pages import PAGES, ROOT, blocks, commands, name, spans

from headway.cli import main
from headway.cli.options import OptionParser
from headway.config.commands import COMMAND_SETTINGS
from headway.config.flags import locate
from headway.config.loader import load_settings
from headway.config.schema import Kind
from headway.envs.packages.folder import read_package
from headway.envs.packages.template import write_template
from headway.envs.registry import find_factory

PLACEHOLDERS = {"RUN": "outputs/my-run", "NAME": "reverse-text", "N": "2", "COMMAND": "rl", "FOLDER": "./word-vowels"}
"""Words that stand for something of the reader's."""
LAYERS = ("base.toml", "mine.toml", "rl.toml", "sft.toml", "trainer.toml")
"""Settings files of the reader's, empty here."""
OF_A_COMMAND = {"data": "sft", "host": "host"}
"""Sections that only one command has; other blocks are settings of `headway rl`."""


class Parsed(BaseException):
    """Ends a command once its options are parsed."""


@pytest.fixture(scope="module", autouse=True)
def _models_are_the_readers() -> Iterator[None]:
    """A dry run would look for the models, environments and losses that a page leaves to its reader."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headway.launch.checks.check_parts", lambda settings: [])
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, _models_are_the_readers: None) -> Path:
    """A working folder with the files that commands name: examples, a run, settings, Python files of the pages."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "examples").symlink_to(ROOT / "examples")
    for layer in LAYERS:
        (folder / layer).touch()
    write_template("word-vowels", folder)
    for page in PAGES:
        for block in blocks(page, "python"):
            if file := re.match(r"# (\w+\.py)\n", block):
                (folder / file[1]).write_text(block)
    assert main.run(["rl", "--run.name", "my-run", "--run.output_dir", str(folder / "outputs"), "--dry-run"]) == 0
    run = folder / "outputs" / "my-run"
    (run / "run.json").write_text("{}")
    (run / "config" / "sft.toml").write_text('[data]\npath = "chats.jsonl"\n')
    (run / "config" / "host.toml").touch()
    (run / "checkpoints" / "step_000100").mkdir(parents=True)
    (run / "checkpoints" / "step_000100" / "COMPLETE").touch()
    return folder


def complete(words: tuple[str, ...]) -> list[str]:
    """Fill placeholders in, and turn commands that read settings into dry runs."""
    argv = [PLACEHOLDERS.get(word, word) for word in words if word != "..."]
    if argv[:2] == ["host", "status"]:
        return argv
    if argv and argv[0] in COMMAND_SETTINGS and (len(argv) > 1 or argv[0] in main.NEED_NO_ARGUMENTS):
        if argv[0] == "sft" and "--resume" not in argv:
            argv[1:1] = ["--data.path", "chats.jsonl"]
        argv += ["--dry-run", "--run.output_dir", "elsewhere"]
    return argv


def check_environments(argv: list[str], options: Any) -> None:
    """Raise where an environment of a command does not exist, or does not take the arguments it is given."""
    match argv:
        case ["env", "demos", env, *_]:
            make = vars(inspect.getmodule(find_factory(env)))["demonstrations"]
            inspect.signature(make).bind(options.n, options.seed, **dict(options.args))
        case ["env", "filter", *_]:
            for env, args in options.envs:
                inspect.signature(find_factory(env)).bind_partial(**args)
        case ["env", "new" | "publish" | "add", *_]:
            pass
        case ["env", "check", env, *_] if "/" in env:
            read_package(Path(env))
        case ["env", _, env, *_]:
            inspect.signature(find_factory(env)).bind_partial(**dict(options.args))
        case ["eval", *_]:
            for env, args in options.envs:
                inspect.signature(find_factory(env)).bind_partial(**args)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_headway_accepts_every_command(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse_args = OptionParser.parse_args
    argv: list[str] = []

    def parse_and_end(self: OptionParser, *args: Any, **kwargs: Any) -> None:
        check_environments(argv, parse_args(self, *args, **kwargs))
        raise Parsed

    monkeypatch.setattr(OptionParser, "parse_args", parse_and_end)
    monkeypatch.chdir(folder)
    refused = {}
    for command in commands("headway", page):
        argv[:] = complete(command)
        capsys.readouterr()
        try:
            code = main.run(argv)
        except Parsed:
            code = 0
        if code:
            refused[" ".join(command)] = capsys.readouterr().err
    assert refused == {}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=name)
def test_every_toml_block_holds_settings(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "toml")):
        if "project" in tomllib.loads(block):  # pyproject.toml of a package
            continue
        file = tmp_path / f"block_{number}.toml"
        file.write_text(block)
        sections = tomllib.loads(block).keys()
        command = next((name for section, name in OF_A_COMMAND.items() if section in sections), "rl")
        load_settings(COMMAND_SETTINGS[command], ["@", str(file)])


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    kinds = [Kind(settings) for settings in COMMAND_SETTINGS.values()]
    sections = {field for kind in kinds for field, item in kind.fields().items() if item.kind.is_settings}
    setting = re.compile(r"(?:^|--(?:no-)?)([a-z]\w*(?:\.\w+)+)(?= |=|$)")
    named = {found for span in spans(page) for found in setting.findall(span) if found.split(".")[0] in sections}
    named = {
        re.sub(r"\.N\b", ".0", found) for found in named if not found.endswith((".toml", ".json", ".jsonl", ".md"))
    }
    unknown = [found for found in named if not any(locate(kind, found) for kind in kinds)]
    assert unknown == []


@pytest.mark.parametrize("page", [page for page in PAGES if commands("python", page)], ids=name)
def test_scripts_and_their_options_exist(page: Path) -> None:
    for words in commands("python", page):
        if words[0] == "-m":
            assert words[1].startswith("gpu_parts.")
            words = (f"benchmarks/{words[1].replace('.', '/')}.py", *words[2:])
        script = ROOT / words[0]
        assert script.is_file(), words
        sources = [script, *script.with_name(f"{script.stem}_parts").glob("*.py")]
        nodes = (node for source in sources for node in ast.walk(ast.parse(source.read_text())))
        literals = {node.value for node in nodes if isinstance(node, ast.Constant)}
        assert [word for word in words if word.startswith("--") and word not in literals] == [], words


@pytest.mark.parametrize("page", [page for page in PAGES if commands("pip", page)], ids=name)
def test_pip_installs_from_a_clone(page: Path) -> None:
    """The name of Headway at the public index may be somebody else's."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for words in commands("pip", page):
        for word in words:
            assert not re.match(r"headway\b", word), f"{name(page)}: pip {' '.join(words)}; write '.[EXTRA]'"
            for extra in re.findall(r"[\w-]+", word.removeprefix(".")) if word.startswith(".[") else []:
                assert extra in extras, f"{name(page)}: {word}"


def test_every_extra_is_in_the_table_of_the_installation() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = re.findall(r"^\| (`[^|]+) \|", (ROOT / "docs" / "installation.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", " ".join(table))) == set(extras)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {words[0] for page in PAGES for words in commands("make", page) if words}
    assert {target for target in named if "=" not in target} <= targets


def test_commands_are_found() -> None:
    assert sum(len(commands("headway", page)) for page in PAGES) > 100
