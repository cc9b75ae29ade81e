"""Questions about charts that are drawn as images: for models that see."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from headway.base.errors import UsageError
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

Question = Literal["value", "compare", "follow"]
_LETTERS = "ABCDEFGH"
MARGIN = 16
"""Pixels at the left and below, for the numbers and letters of the axes."""
_TOP = 4


class Charts(DrawnQuestions):
    """Charts of `columns` columns, with values of 0 to `most` in steps of `step` pixels. Asked is one of `questions`:
    the value of a bar, which of two bars is higher, or the value of one of three lines that cross each other.
    """

    def __init__(
        self,
        *,
        num_tasks: int = 512,
        columns: int = 4,
        most: int = 6,
        step: int = 12,
        questions: Sequence[Question] = ("value", "compare", "follow"),
        split: Split = "train",
        seed: int = 0,
    ) -> None:
        if not 2 <= columns <= len(_LETTERS) or not 2 <= most <= 20 or not 8 <= step <= 64:
            raise UsageError(
                f"charts: columns must be 2 to {len(_LETTERS)}, most 2 to 20 and step 8 to 64 "
                f"(got {columns}, {most} and {step})"
            )
        check_questions("charts", questions, get_args(Question))
        self._most, self._step = most, step
        super().__init__(
            distinct(
                lambda rng: _problem(rng, columns, most, rng.choice(list(questions))),
                str,
                num_tasks,
                split=split,
                seed=seed,
            )
        )

    def picture(self, problem: Mapping[str, Any]) -> bytes:
        return draw(problem, self._most, self._step)


def demonstrations(n: int, seed: int = 0, wrong_share: float = 0.0, **args: Any) -> list[Row]:
    """`n` conversations, none of them a task of the eval split. A share of them mistakes the right answer for the next
    one, in the order of the alphabet, that questions of its kind have."""
    return demonstrate(Charts(num_tasks=n, seed=seed, split="train", **args), seed, wrong_share)


def _problem(rng: random.Random, columns: int, most: int, question: Question) -> dict[str, Any]:
    """Bars hold one list of values, lines one for each color."""
    if question == "follow":
        lines = {color: [rng.randint(0, most) for _ in range(columns)] for color in COLORS}
        color, column = rng.choice(list(COLORS)), rng.randrange(columns)
        # Where two lines meet, one may hide the other.
        for values, value in zip(lines.values(), rng.sample(range(most + 1), len(lines)), strict=True):
            values[column] = value
        text = f"What is {color} at {_LETTERS[column]}?"
        return {"lines": lines, "question": text, "answer": str(lines[color][column])}
    bars = [rng.randint(1, most) for _ in range(columns)]
    one, other = rng.sample(range(columns), 2)
    if question == "value":
        return {"bars": bars, "question": f"How high is {_LETTERS[one]}?", "answer": str(bars[one])}
    if bars[one] == bars[other]:
        bars[one] = bars[one] % most + 1
    text = f"Which is higher, {_LETTERS[one]} or {_LETTERS[other]}?"
    return {"bars": bars, "question": text, "answer": _LETTERS[one if bars[one] > bars[other] else other]}


def place(column: int, value: int, most: int, step: int) -> tuple[int, int]:
    """The pixel of a value of a column, in its middle."""
    return MARGIN + 2 * step * column + step, _TOP + (most - value) * step


def draw(problem: Mapping[str, Any], most: int, step: int) -> bytes:
    """Draw a chart as a PNG: axes with numbers and letters, and bars or lines."""
    lines: Mapping[str, Sequence[int]] = problem.get("lines", {})
    bars: Sequence[int] = problem.get("bars", ())
    columns = len(bars) or len(next(iter(lines.values())))
    width, bottom = MARGIN + 2 * step * columns, _TOP + most * step
    image, pen = blank_image(width, bottom + MARGIN)
    for value in range(most + 1):
        _, y = place(0, value, most, step)
        pen.line([(MARGIN, y), (width, y)], fill=GRAY if value else BLACK)
        write(pen, (MARGIN / 2, y), str(value), 8)
    for column in range(columns):
        write(pen, (place(column, 0, most, step)[0], bottom + MARGIN / 2), _LETTERS[column], 10)
    for column, value in enumerate(bars):
        x, y = place(column, value, most, step)
        pen.rectangle([(x - step // 2, y), (x + step // 2, bottom)], fill=COLORS["blue"])
    for color, values in lines.items():
        points = [place(column, value, most, step) for column, value in enumerate(values)]
        pen.line(points, fill=COLORS[color], width=2)
    return png(image)
