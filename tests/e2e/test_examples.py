"""Every example has what its page promises: settings that resolve, tasks that load, a plot of a real run."""

import re
import runpy
from pathlib import Path

import pytest
from e2e_runs import EXAMPLES

from headway.config.loader import load_settings
from headway.config.rl import RlSettings
from headway.config.sft import SftSettings
from headway.envs.bundled.kuhn_poker import DEALS, Hand
from headway.envs.registry import load_environment

CONFIGS = sorted(EXAMPLES.glob("*/rl*.toml"))
PAGES = sorted(EXAMPLES.glob("**/README.md"))


def name(file: Path) -> str:
    return str(file.relative_to(EXAMPLES))


@pytest.mark.parametrize("file", CONFIGS, ids=name)
def test_settings_of_runs_resolve(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)  # where the pages say that commands are run
    settings = load_settings(RlSettings, ["@", str(file)]).settings
    assert settings.orchestrator.envs
    for env in [*settings.orchestrator.envs, *settings.orchestrator.eval.envs]:
        assert load_environment(env.id, env.args).tasks()


def test_settings_of_a_first_run_resolve() -> None:
    envs = ["--orchestrator.envs", '[{id = "calculator"}]']
    assert load_settings(RlSettings, ["@", str(EXAMPLES / "base.toml"), *envs]).settings.orchestrator.envs


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("warm_up*.toml")), ids=name)
def test_settings_of_warm_ups_resolve(file: Path) -> None:
    load_settings(SftSettings, ["@", str(file), "--data.path", "rows.jsonl"])


def test_every_example_has_a_page_that_the_index_names() -> None:
    index = (EXAMPLES / "README.md").read_text()
    for folder in {file.parent for file in CONFIGS}:
        assert (folder / "README.md").is_file(), folder
        assert f"({folder.name}/README.md)" in index


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_a_page_shows_or_links_to_are_there(page: Path) -> None:
    for target in re.findall(r"\]\((?!https:)([^)#:]+)[^)]*\)|src=\"([^\"]+)\"", page.read_text()):
        assert (page.parent / "".join(target)).exists(), target


def test_the_house_plays_an_equilibrium_of_kuhn_poker() -> None:
    bold_chance = runpy.run_path(str(EXAMPLES / "kuhn_poker" / "house.py"))["BOLD"]

    def value(hand: Hand) -> float:
        if not hand.legal:
            return hand.payoff()
        chance = bold_chance[hand.actions][hand.cards[hand.player]]
        bold, timid = ("call", "fold") if "call" in hand.legal else ("bet", "check")
        after = {action: value(Hand(hand.cards, (*hand.actions, action))) for action in hand.legal}
        return chance * after[bold] + (1 - chance) * after[timid]

    assert sum(value(Hand(deal)) for deal in DEALS) / len(DEALS) == pytest.approx(-1 / 18)
