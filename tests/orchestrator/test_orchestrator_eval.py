"""`headway eval` against a server, and evaluation rounds as such."""

import json
from pathlib import Path

import pytest
from engine_script import ScriptedEngine

from headway.base.errors import UsageError
from headway.cli import eval as eval_command
from headway.cli.main import run as headway
from headway.models.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_tokenizer(folder)
    return folder


def test_two_environments_in_one_table(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedEngine() as engine:
        common = ["eval", "--url", engine.url, "--model", str(model), "--tasks", "3", "--samples", "4"]
        envs = ["--env", "reverse-text", "--args.split", "eval", "--env", "sort-words"]
        assert headway([*common, *envs, "--max-tokens", "6", "-o", str(tmp_path)]) == 0
        assert engine.requests >= 24
    table = capsys.readouterr().out
    assert "reverse-text" in table and "sort-words" in table and "pass@4" in table
    lines = (tmp_path / "step_000000_reverse-text.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == 3 and all(len(record["rewards"]) == 4 and not record["errors"] for record in records)


def test_a_server_that_is_not_there_is_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert headway(["eval", "--url", "http://127.0.0.1:9", "--env", "reverse-text", "--model", str(model)]) == 1
    assert capsys.readouterr().err == (
        "headway: no inference server answers at http://127.0.0.1:9; start one with `headway serve MODEL`\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--env", "x"], "--url"),
        (["--url", "u"], "--env"),
        (["--url", "u", "--args.split", "eval"], "name one with --env before it"),
        (["--url", "u", "--env", "x", "--tasks", "few"], "--tasks: invalid int value: 'few'"),
        (["--url", "u", "--env", "x", "--frobnicate", "1"], "unrecognized arguments: --frobnicate"),
        (["--url", "u", "--env"], "--env: expected one argument"),
    ],
)
def test_wrong_usage_is_explained(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        eval_command.run(argv)


def test_arguments_of_environments_are_json_where_they_can_be() -> None:
    argv = ["--url=u", "--env", "a", "--args.n=3", "--args.on", "true", "--env", "b", "--args.split", "eval"]
    assert eval_command.parse(argv).envs == [("a", {"n": 3, "on": True}), ("b", {"split": "eval"})]
