"""Charts and screens ask what they show: a policy that looks at the pixels alone answers everything."""

import io
from functools import cache
from typing import Any

import pytest
from PIL import Image

from headway.base.errors import UsageError
from headway.core.messages import Message
from headway.envs.bundled import charts, screens
from headway.envs.bundled.charts import Charts
from headway.envs.bundled.drawn import COLORS, DrawnQuestions
from headway.envs.bundled.screens import LABELS, Screens, button_box
from headway.envs.testing import play

MOST, STEP = 6, 12


def pixels(messages: list[Message]) -> Image.Image:
    (image,) = messages[-1].images
    return Image.open(io.BytesIO(image.data)).convert("RGB")


def read_chart(_agent: str, messages: list[Message]) -> str:
    image, words = pixels(messages), messages[-1].content.rstrip("?").replace(",", "").split()

    def bar(letter: str) -> int:
        x, bottom = charts.place("ABCDEFGH".index(letter), 0, MOST, STEP)
        blue = [y for y in range(bottom) if image.getpixel((x, y)) == COLORS["blue"]]
        return (bottom - min(blue)) // STEP

    def line(color: str, letter: str) -> int:
        found = [charts.place("ABCDEFGH".index(letter), value, MOST, STEP) for value in range(MOST + 1)]
        ends = [
            any(image.getpixel((x + dx, y + dy)) == COLORS[color] for dx in (-1, 0, 1) for dy in (-1, 0, 1))
            for x, y in found
        ]
        return ends.index(True)

    match words:
        case ["How", "high", "is", letter]:
            return str(bar(letter))
        case ["Which", "is", "higher", one, "or", other]:
            return one if bar(one) > bar(other) else other
        case ["What", "is", color, "at", letter]:
            return str(line(color, letter))
    raise AssertionError(words)


@cache
def button(label: str, *, marked: bool) -> bytes:
    shown = Image.open(io.BytesIO(screens.draw([[label]], label if marked else "")))
    return shown.crop(button_box(0, 0)).convert("RGB").tobytes()


def read_screen(_agent: str, messages: list[Message]) -> str:
    image, words = pixels(messages), messages[-1].content.rstrip("?.").split()
    rows, columns = (image.height - 16) // screens.CELL[1], image.width // screens.CELL[0]
    shown: dict[tuple[int, int], tuple[str, bool]] = {}
    for row, column in ((row, column) for row in range(rows) for column in range(columns)):
        own = image.crop(button_box(row, column)).tobytes()
        (found,) = [(label, on) for label in LABELS for on in (False, True) if button(label, marked=on) == own]
        shown[row, column] = found
    at = {label: place for place, (label, _) in shown.items()}
    match words:
        case ["Which", "button", "is", "marked"]:
            return next(label for label, marked in shown.values() if marked)
        case ["Click", "on", label]:
            left, top, right, bottom = button_box(*at[label])
            return f"({left + 1}, {(top + bottom) // 2})" if right else ""
        case ["What", "is", *side, label]:
            down, right = {"right": (0, 1), "left": (0, -1), "below": (1, 0), "above": (-1, 0)}[side[0]]
            return shown[at[label][0] + down, at[label][1] + right][0]
    raise AssertionError(words)


@pytest.mark.parametrize(("kind", "look"), [(Charts, read_chart), (Screens, read_screen)])
def test_a_policy_that_looks_has_the_perfect_score(kind: Any, look: Any) -> None:
    environment: DrawnQuestions = kind(num_tasks=60)
    for task in environment.tasks():
        (trace,) = play(environment, task, look)
        assert trace.reward == 1, task.data
        (trace,) = play(environment, task, "nothing")
        assert trace.reward == 0
    assert len({str(task.data["question"]).split()[0] for task in environment.tasks()}) == 3
    again, evals = kind(num_tasks=60), kind(num_tasks=40, split="eval")
    assert [task.data for task in again.tasks()] == [task.data for task in environment.tasks()]
    known = {str(task.data) for task in kind(num_tasks=300).tasks()}
    assert not known & {str(task.data) for task in evals.tasks()}


def test_points_count_on_the_button_alone() -> None:
    environment = Screens(num_tasks=1, questions=["click"])
    (task,) = environment.tasks()
    left, top, right, bottom = task.data["box"]
    assert all(environment.correct(task, f"{x} {y}") == 1 for x, y in ((left, top), (right, bottom)))
    for wrong in (f"{left - 1} {top}", f"{left} {bottom + 1}", f"{left}", f"{left} {top} {top}", "", "9" * 50):
        assert environment.correct(task, wrong) == 0, wrong


def test_demonstrations_are_right_or_mistaken_as_asked() -> None:
    for module, kind in ((charts, Charts), (screens, Screens)):
        answers = [task.data["answer"] for task in kind(num_tasks=20).tasks()]  # type: ignore[operator]
        right, wrong = (module.demonstrations(20, wrong_share=share) for share in (0.0, 1.0))
        assert [row["messages"][-1]["content"] for row in right] == answers
        assert all(row["messages"][-1]["content"] != answer for row, answer in zip(wrong, answers, strict=True))


def test_arguments_out_of_range_are_refused() -> None:
    for make in (
        lambda: Charts(columns=9),
        lambda: Charts(most=1),
        lambda: Charts(questions=["color"]),  # type: ignore[list-item]
        lambda: Screens(rows=1, columns=1),
        lambda: Screens(questions=[]),
    ):
        with pytest.raises(UsageError, match=r"charts|screens"):
            make()
