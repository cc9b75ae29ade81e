"""Questions about shapes in a grid that is drawn as an image: for models that see."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from headway.base.errors import UsageError
from headway.envs.bundled.drawn import COLORS, GRAY, DrawnQuestions, blank_image, check_questions, demonstrate, png
from headway.envs.bundled.problems import Row, Split, distinct

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Question = Literal["count", "locate", "compare", "color"]
SHAPES = ("circle", "square", "triangle")
_LETTERS = "ABCDEFGH"
Cell = tuple[int, int, str, str]
"""Row, column, color and shape."""


class Grid(DrawnQuestions):
    """A square grid of `size` x `size` cells of `cell` pixels, some of which hold a shape. Asked is one of `questions`:
    how many shapes of a color there are, in which cell (such as B2: second column, second row) the first of a color and
    shape is, of which of two colors there are more, or, the easiest, which color all shapes have. The image is drawn
    from the task, so that nothing is stored.
    """

    def __init__(
        self,
        *,
        num_tasks: int = 512,
        size: int = 2,
        cell: int = 16,
        questions: Sequence[Question] = ("count", "locate", "compare"),
        split: Split = "train",
        seed: int = 0,
    ) -> None:
        if not 2 <= size <= len(_LETTERS) or not 8 <= cell <= 128:
            raise UsageError(f"grid: size must be 2 to {len(_LETTERS)} and cell 8 to 128 (got {size} and {cell})")
        check_questions("grid", questions, get_args(Question))
        self._size, self._cell = size, cell
        super().__init__(
            distinct(
                lambda rng: _problem(rng, size, rng.choice(list(questions))), str, num_tasks, split=split, seed=seed
            )
        )

    def picture(self, problem: Mapping[str, Any]) -> bytes:
        return draw(tuple(tuple(cell) for cell in problem["cells"]), self._size, self._cell)


def demonstrations(n: int, seed: int = 0, wrong_share: float = 0.0, **args: Any) -> list[Row]:
    """`n` conversations, none of them a task of the eval split. A share of them mistakes the right answer for the next
    one, in the order of the alphabet, that questions of its kind have."""
    return demonstrate(Grid(num_tasks=n, seed=seed, split="train", **args), seed, wrong_share)


def _problem(rng: random.Random, size: int, question: Question) -> dict[str, Any]:
    places = [(row, column) for row in range(size) for column in range(size)]
    cells: list[Cell] = [
        (row, column, rng.choice(list(COLORS)), rng.choice(SHAPES))
        for row, column in sorted(rng.sample(places, rng.randint(1, len(places))))
    ]
    if question == "color":
        color = rng.choice(list(COLORS))
        one_color: list[Cell] = [(row, column, color, shape) for row, column, _, shape in cells]
        return {"cells": one_color, "question": "Which color?", "answer": color}
    text, answer = {"count": _count, "locate": _locate, "compare": _compare}[question](rng, cells)
    return {"cells": cells, "question": text, "answer": answer}


def _count(rng: random.Random, cells: Sequence[Cell]) -> tuple[str, str]:
    color = rng.choice(list(COLORS))
    return f"How many {color}?", str(sum(cell[2] == color for cell in cells))


def _locate(rng: random.Random, cells: Sequence[Cell]) -> tuple[str, str]:
    """Ask for the first cell, row by row, that holds a color and shape."""
    _, _, color, shape = rng.choice(cells)
    row, column, _, _ = min(cell for cell in cells if cell[2:] == (color, shape))
    return f"Where is the first {color} {shape}?", f"{_LETTERS[column]}{row + 1}"


def _compare(rng: random.Random, cells: Sequence[Cell]) -> tuple[str, str]:
    one, other = rng.sample(list(COLORS), 2)
    counts = Counter(cell[2] for cell in cells)
    more = "same" if counts[one] == counts[other] else one if counts[one] > counts[other] else other
    return f"More {one} or {other}?", more


@lru_cache(256)
def draw(cells: tuple[Cell, ...], size: int, cell: int) -> bytes:
    """Draw a grid as a PNG."""
    image, pen = blank_image(size * cell, size * cell)
    for line in range(1, size):
        pen.line([(line * cell, 0), (line * cell, size * cell)], fill=GRAY)
        pen.line([(0, line * cell), (size * cell, line * cell)], fill=GRAY)
    for row, column, color, shape in cells:
        _draw_shape(pen, (column * cell, row * cell), cell, COLORS[color], shape)
    return png(image)


def _draw_shape(pen: "ImageDraw", at: tuple[int, int], cell: int, color: tuple[int, int, int], shape: str) -> None:
    margin = max(2, cell // 6)
    left, top = at[0] + margin, at[1] + margin
    right, bottom = at[0] + cell - margin, at[1] + cell - margin
    if shape == "circle":
        pen.ellipse([(left, top), (right, bottom)], fill=color)
    elif shape == "square":
        pen.rectangle([(left, top), (right, bottom)], fill=color)
    else:
        pen.polygon([((left + right) / 2, top), (right, bottom), (left, bottom)], fill=color)
