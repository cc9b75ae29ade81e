"""Questions about windows with buttons that are drawn as images: for models that see."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.envs.base import reward
from headway.envs.bundled.drawn import (
    BLACK,
    COLORS,
    GRAY,
    DrawnQuestions,
    blank_image,
    check_questions,
    demonstrate,
    png,
    write,
)
from headway.envs.bundled.problems import Row, Split, distinct

Question = Literal["marked", "neighbor", "click"]
LABELS = ("Save", "Open", "Close", "Print", "Undo", "Copy", "Paste", "Help", "Send", "Back", "Next", "Stop")
CELL = (56, 24)
"""Pixels of a button's place; the button itself has a margin of 4 in it."""
_TITLE = 16
_SIDES = {"right of": (0, 1), "left of": (0, -1), "below": (1, 0), "above": (-1, 0)}
_POINT = re.compile(r"\D*(\d{1,4})\D+(\d{1,4})\D*")
Box = tuple[int, int, int, int]


class Screens(DrawnQuestions):
    """A window with `rows` x `columns` buttons, of which one is marked. Asked is one of `questions`: which button is
    marked, which one is beside another, or where to click on one: a point in pixels from the upper left, such as
    `84 28`, which counts if it is on that button.
    """

    def __init__(
        self,
        *,
        num_tasks: int = 512,
        rows: int = 3,
        columns: int = 2,
        questions: Sequence[Question] = ("marked", "neighbor", "click"),
        split: Split = "train",
        seed: int = 0,
    ) -> None:
        if rows < 1 or columns < 1 or not 2 <= rows * columns <= len(LABELS):
            raise UsageError(f"screens: rows x columns must be 2 to {len(LABELS)} (got {rows} and {columns})")
        check_questions("screens", questions, get_args(Question))
        super().__init__(
            distinct(
                lambda rng: _problem(rng, rows, columns, rng.choice(list(questions))),
                str,
                num_tasks,
                split=split,
                seed=seed,
            )
        )

    def picture(self, problem: Mapping[str, Any]) -> bytes:
        return draw(problem["buttons"], problem["marked"])

    @reward
    def correct(self, task: Task, answer: str) -> float:
        if "box" not in task.data:
            return float(answer.strip().lower() == task.data["answer"].lower())
        found = _POINT.fullmatch(answer)
        left, top, right, bottom = task.data["box"]
        return float(found is not None and left <= int(found[1]) <= right and top <= int(found[2]) <= bottom)


def demonstrations(n: int, seed: int = 0, wrong_share: float = 0.0, **args: Any) -> list[Row]:
    """`n` conversations, none of them a task of the eval split. A share of them mistakes the right answer for the next
    one, in the order of the alphabet, that questions of its kind have."""
    return demonstrate(Screens(num_tasks=n, seed=seed, split="train", **args), seed, wrong_share)


def button_box(row: int, column: int) -> Box:
    """The left, upper, right and lower pixel of a button."""
    left, top = column * CELL[0] + 4, _TITLE + row * CELL[1] + 4
    return left, top, left + CELL[0] - 9, top + CELL[1] - 9


def _problem(rng: random.Random, rows: int, columns: int, question: Question) -> dict[str, Any]:
    labels = rng.sample(LABELS, rows * columns)
    buttons = [labels[row * columns : (row + 1) * columns] for row in range(rows)]
    screen = {"buttons": buttons, "marked": rng.choice(labels)}
    row, column = rng.randrange(rows), rng.randrange(columns)
    if question == "marked":
        return screen | {"question": "Which button is marked?", "answer": screen["marked"]}
    if question == "click":
        left, top, right, bottom = box = button_box(row, column)
        point = f"{(left + right) // 2} {(top + bottom) // 2}"
        return screen | {"question": f"Click on {buttons[row][column]}.", "answer": point, "box": box}
    beside = [
        (side, row + down, column + right)
        for side, (down, right) in _SIDES.items()
        if 0 <= row + down < rows and 0 <= column + right < columns
    ]
    side, other_row, other_column = rng.choice(beside)
    text = f"What is {side} {buttons[row][column]}?"
    return screen | {"question": text, "answer": buttons[other_row][other_column]}


def draw(buttons: Sequence[Sequence[str]], marked: str) -> bytes:
    """Draw a window as a PNG: a title bar, and buttons of which one is blue."""
    width, height = CELL[0] * len(buttons[0]), _TITLE + CELL[1] * len(buttons)
    image, pen = blank_image(width, height, (245, 245, 245))
    pen.rectangle([(0, 0), (width, _TITLE - 2)], fill=(60, 60, 60))
    pen.ellipse([(4, 4), (10, 10)], fill=COLORS["red"])
    for row, labels in enumerate(buttons):
        for column, label in enumerate(labels):
            left, top, right, bottom = button_box(row, column)
            chosen = label == marked
            pen.rectangle([(left, top), (right, bottom)], fill=COLORS["blue"] if chosen else GRAY, outline=BLACK)
            center = ((left + right) / 2, (top + bottom) / 2)
            write(pen, center, label, 10, (255, 255, 255) if chosen else BLACK)
    return png(image)
