"""Settings written: TOML that reads back, one file per process, and the reference in docs/."""

import datetime
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headway.config.commands import COMMAND_SETTINGS, PROCESSES, process_settings, write_process_settings
from headway.config.loader import load_settings, write_settings
from headway.config.reference import reference
from headway.config.rl import RlSettings
from headway.config.toml import dump, to_toml

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("command", COMMAND_SETTINGS)
def test_defaults_of_every_command_read_back(command: str, tmp_path: Path) -> None:
    kind = COMMAND_SETTINGS[command]
    write_settings(kind(), tmp_path / "a.toml")
    assert load_settings(kind, ["@", str(tmp_path / "a.toml")]).settings == kind()


def test_odd_values_read_back() -> None:
    table = {
        "text": 'quote " backslash \\ newline \n tab \t del \x7f ünï',
        "odd key!": {"a.b": 1, "": 2},
        "dates": [datetime.date(2026, 1, 31), datetime.datetime(2026, 1, 31, 12, 0)],
        "numbers": [1, -2.5, 1e-9, 1e22, float("inf"), True],
        "mixed": [1, {"inline": {"x": []}}],
        "tables": [{"a": 1, "b": {"c": 2}}, {"a": 2}],
        "empty": {},
    }
    assert tomllib.loads(dump(table)) == table


def test_none_is_left_out_of_tables() -> None:
    assert tomllib.loads(dump({"a": None, "b": {"c": None}})) == {"b": {}}


def test_a_run_is_dealt_to_its_processes(tmp_path: Path) -> None:
    argv = ["--seed", "7", "--trainer.optim.lr", "1e-3", "--inference.port", "0", "--orchestrator.envs", '[{id = "a"}]']
    settings = load_settings(RlSettings, argv).settings
    parts = process_settings(settings)
    assert set(parts) == set(PROCESSES)
    files = write_process_settings(settings, tmp_path)
    assert [file.name for file in files] == ["rl.toml", "trainer.toml", "orchestrator.toml", "inference.toml"]
    for name, kind in PROCESSES.items():
        assert load_settings(kind, ["@", str(tmp_path / f"{name}.toml")]).settings == parts[name]
    assert load_settings(RlSettings, ["@", str(files[0])]).settings == settings


def test_the_reference_in_docs_is_the_one_the_command_prints() -> None:
    written = (DOCS / "settings.md").read_text()
    assert written == reference(), "run `headway config docs > docs/settings.md`"


def test_every_setting_says_what_it_means() -> None:
    silent = [line for line in reference().splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert silent == []


def test_config_show_prints_toml_with_origins(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("seed = 3\n")
    command = [sys.executable, "-m", "headway.cli.main", "config", "show", "rl", "@", "a.toml", "--max-steps=9"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "seed = 3  # a.toml\n" in shown
    assert "max_steps = 9  # --max-steps\n" in shown
    assert "seq_len = 2048  # default\n" in shown
    assert tomllib.loads(shown) == tomllib.loads(
        to_toml(load_settings(RlSettings, ["--seed=3", "--max-steps=9"]).settings)
    )
