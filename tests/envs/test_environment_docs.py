"""The examples of the documentation run as they stand."""

import re
from pathlib import Path

import pytest

from headway.core.messages import Message, ToolCall
from headway.envs.base import Environment

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def environments() -> dict[str, object]:
    names: dict[str, object] = {}
    for block in blocks("environments.md"):
        exec(block, names)
    return names


@pytest.mark.parametrize(
    ("name", "answers", "rewards"),
    [
        ("Reverse", ["cba"], [1.0]),
        ("Guess", ["5", "1"], [0.5]),
        ("Shop", [Message("assistant", "", (ToolCall("1", "price", '{"item": "tea"}'),)), "It is 5."], [1.0]),
        ("Nim", ["3", "2"], [-1.0, 1.0]),
        ("Nim", ["1", "four"], [1.0, -1.0]),
        ("Propose", ["1+1", "2", "two", "2", "2"], [0.0, 1.0, 0.0, 1.0, 1.0]),
    ],
)
def test_the_environments_of_the_page_reward_what_they_say(name, answers, rewards):
    names = environments()
    environment = names[name]()
    assert isinstance(environment, Environment)
    traces = names["play"](environment, 0, answers)
    assert [trace.reward for trace in traces] == rewards


def test_the_test_of_the_page_passes():
    environments()["test_the_reversed_word_is_rewarded"]()


def test_the_example_of_the_rendering_page_prints_a_prompt(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("rendering.md")
    exec(block, {})
    assert capsys.readouterr().out == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n\n"
