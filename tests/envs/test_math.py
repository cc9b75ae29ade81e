"""Math problems: answers are compared as mathematics, in a process that is replaced when it hangs."""

import asyncio
import json
import time
from pathlib import Path

import pytest

pytest.importorskip("math_verify", reason="needs the extra math")

from headway.base.errors import UsageError
from headway.envs.bundled import math as math_environment
from headway.envs.bundled.math import Math, is_correct


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("1/2", "so it is \\boxed{0.5}", True),
        ("1/2", "\\boxed{\\frac{1}{2}}", True),
        ("-7/3", "first 2, no: \\boxed{-\\frac{7}{3}}", True),
        ("\\frac{\\sqrt{3}}{3}", "\\boxed{\\frac{1}{\\sqrt{3}}}", True),
        ("42", "\\boxed{41}", False),
        ("42", "", False),
        ("42", "I do not know", False),
    ],
)
def test_answers_are_compared_as_mathematics(gold: str, answer: str, right: bool) -> None:
    assert is_correct(gold, answer) is right


def test_problems_are_made_up_or_read_from_rows(tmp_path: Path) -> None:
    first, held_out = Math(num_tasks=20), Math(num_tasks=20, split="eval")
    assert [task.data for task in first.tasks()] == [task.data for task in Math(num_tasks=20).tasks()]
    assert not {t.data["problem"] for t in first.tasks()} & {t.data["problem"] for t in held_out.tasks()}
    rows = [{"question": "1+1?", "answer": "one and one\n#### 2"}, {"question": "2+2?", "answer": "4"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = Math(str(tmp_path / "rows.jsonl"), problem="question", num_tasks=1)
    assert [task.data for task in env.tasks()] == [{"problem": "1+1?", "answer": "2"}]
    with pytest.raises(UsageError, match="name the columns"):
        Math(str(tmp_path / "rows.jsonl"))


def hang(gold: str, answer: str) -> bool:
    time.sleep(60)
    return True


def test_the_reward_comes_from_another_process_which_is_replaced_when_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Math(num_tasks=1)
    (task,) = env.tasks()

    async def play() -> list[float]:
        right = await env.correct(task, f"\\boxed{{{task.data['answer']}}}")
        monkeypatch.setattr(math_environment, "LIMIT_SECONDS", 0.2)
        monkeypatch.setattr(math_environment, "is_correct", hang)
        hung = await env.correct(task, "x")
        monkeypatch.undo()
        again = await env.correct(task, f"\\boxed{{{task.data['answer']}}}")
        await env.close()
        return [right, hung, again]

    assert asyncio.run(play()) == [1.0, 0.0, 1.0]
