"""Every example's settings resolve, so that no page shows a command that can't start."""

from pathlib import Path

import pytest
from e2e_runs import EXAMPLES

from headway.config.loader import load_settings
from headway.config.rl import RlSettings
from headway.config.sft import SftSettings


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/rl*.toml")), ids=lambda file: file.parent.name)
def test_settings_of_runs_resolve(file: Path) -> None:
    layers = [EXAMPLES / "reverse_text" / "rl.toml", file] if file.parent.name == "moe" else [file]
    settings = load_settings(RlSettings, [part for layer in layers for part in ("@", str(layer))]).settings
    assert settings.orchestrator.envs


def test_settings_of_the_warm_up_resolve() -> None:
    load_settings(SftSettings, ["@", str(EXAMPLES / "warm_up.toml"), "--data.path", "rows.jsonl"])
