"""`headway env` as it is typed."""

import io
import json
from pathlib import Path

import pytest

from headway.cli.main import run
from headway.core.messages import Message, ToolCall
from headway.envs.bundled import ENVIRONMENTS
from headway.envs.transcript import message_text, painted, plain

VAULT = """
from headway.envs.base import Task, ToolUse, reward

class Vault(ToolUse):
    def __init__(self, *, boxes=2):
        def peek(box: str) -> str:
            return box
        peek.__doc__ = f"Look into one of {boxes} boxes."
        self.tools = [peek]
    def tasks(self):
        return [Task("0", {})]
    def prompt(self, task):
        return "Open it"
    @reward
    def good(self, answer):
        return 1.0

def demonstrations(n, seed, share, boxes):
    yield {"messages": []}
    yield {"messages": [], "tools": []}
"""


def headway(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = run(["env", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))


def test_help_and_list_name_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage: headway env list" in headway(capsys, "--help")[1]
    assert "usage: headway env list" in headway(capsys, "try", "--help")[1]
    code, out, _ = headway(capsys, "list")
    assert code == 0
    assert all(name in out for name in ENVIRONMENTS)


def test_show_tells_arguments_rewards_tools_and_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = headway(capsys, "show", "calculator", "--tasks", "2", "--args.terms", "3")
    assert code == 0
    for part in ("largest = 99", "correct (weight 1)", "tool_calls (a metric)", "calculate: Work out", "tasks: 512"):
        assert part in out
    assert out.count("= ?") == 2


def test_show_of_an_adapter_says_which_arguments_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = headway(capsys, "show", "reasoning-gym")
    assert (code, "dataset (required)" in out, "tasks:" in out) == (0, True, False)


def test_an_episode_by_hand(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, '/call calculate {"expression": "2+3"}', "5")
    code, out, _ = headway(capsys, "try", "calculator", "--args.num_tasks", "1")
    assert code == 0
    assert "tool: 5" in out
    assert "reward 0 (correct 0, tool_calls 1)" in out
    assert "\x1b" not in out


def test_a_game_by_hand_shows_each_seat_its_own_view_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "check", "bet", "call")
    code, out, _ = headway(capsys, "try", "kuhn-poker", "--task", "1", "--args.system", "null")
    assert code == 0
    assert out.splitlines() == [
        "user: you hold J",
        "check or bet?",
        "user: you hold K",
        "opponent: check",
        "check or bet?",
        "user: opponent: bet",
        "call or fold?",
        "first: reward -2 (score -2)",
        "second: reward 2 (score 2)",
    ]


def test_an_input_that_ends_early_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch)
    code, _, err = headway(capsys, "try", "reverse-text")
    assert (code, err) == (1, "headway: the episode ended early: the input ended\n")


def test_a_served_model_plays_and_its_tokens_are_marked(
    capsys: pytest.CaptureFixture[str], engine: str, tiny: Path
) -> None:
    words = ("try", "reverse-text", "--url", engine, "--tokens", "--max-tokens", "3", "--temperature", "0")
    code, out, _ = headway(capsys, *words)
    assert code == 0
    assert "tokens, 3 sampled, mean logprob -" in out
    text = out[out.index("<|im_start|>") :]
    assert text.startswith("<|im_start|>user⏎\n")
    assert text.count("[") == 3 or "[[]" in text
    assert "policy: reward" in out


def test_an_engine_that_is_away_is_said_before_anything_is_played(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, errors = headway(capsys, "try", "reverse-text", "--url", "http://127.0.0.1:9")
    assert (code, out) == (1, "") and "no inference server answers at http://127.0.0.1:9" in errors


def test_demonstrations_are_written_as_jsonl(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    code, out, _ = headway(capsys, "demos", "reverse-text", "-n", "10", "--args.copy_share", "1.0", "-o", str(file))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert (code, out) == (0, f"10 conversations in {file}\n")
    assert len(rows) == 10
    assert all(row["messages"][0]["content"] == row["messages"][1]["content"] for row in rows)
    assert headway(capsys, "demos", "reverse-text", "-n", "1")[1].startswith('{"messages"')


def test_demonstrations_get_the_tools_of_their_environment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vault.py").write_text(VAULT)
    monkeypatch.chdir(tmp_path)
    _, out, _ = headway(capsys, "demos", "vault.py:Vault", "--args.share", "0.5", "--args.boxes", "3")
    with_tools, with_its_own = (json.loads(line) for line in out.splitlines())
    assert with_its_own["tools"] == []
    (tool,) = with_tools["tools"]
    assert (tool["function"]["name"], tool["function"]["description"]) == ("peek", "Look into one of 3 boxes.")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("fly",), "takes list, show NAME"),
        (("show",), "takes list, show NAME"),
        (("try", "reverse-txt"), 'did you mean "reverse-text"?'),
        (("try", "reverse-text", "--fast", "x"), "unrecognized arguments: --fast"),
        (("try", "reverse-text", "--task"), "--task: expected one argument"),
        (("try", "reverse-text", "--task", "x"), "--task: invalid int value: 'x'"),
        (("try", "reverse-text", "--task", "99999"), "--task must be from 0 to 1023"),
        (("show", "reverse-text", "--args.min_len", "9"), "min_len must be"),
        (("show", "reverse-text", "--args.color", "red"), "unexpected keyword argument 'color'"),
        (("demos", "reverse-text", "--args.color", "red"), "unexpected keyword argument 'color'"),
        (("demos", "textarena"), "brings no demonstrations"),
        (("show", "nothing.py:Name"), "there is no file"),
        (("try", "shout.py"), "as in shout.py:Name"),
        (("try", "reverse-text", "--args.num_tasks", "0"), "has no tasks"),
        (("try", "reverse-text", "--args.num_tasks", "many"), "could not be built with num_tasks = 'many'"),
    ],
)
def test_mistakes_are_one_line_with_what_to_do(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    code, _, err = headway(capsys, *words)
    assert code in (1, 2)
    assert reason in err
    assert err.count("\n") == 1


def test_paint_colors_and_resets() -> None:
    assert painted("sampled", "x") == "\x1b[32mx\x1b[0m"


def test_what_a_model_says_cannot_steer_the_terminal() -> None:
    call = ToolCall("c", "f\x07", "{\x1b}")
    shown = message_text(Message("assistant", "a\x1b[2Jb\nc\t\x7f", (call,), reasoning="\x00"), plain)
    assert shown == "assistant: <think>␀</think> a␛[2Jb\nc␉␡ → f␇({␛})"
