"""Questions about shapes in a grid that is drawn as an image: for models that see."""

import io
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from headway.core.episodes import Task
from headway.core.errors import UsageError
from headway.core.extras import install_command
from headway.core.messages import Message, as_messages, image_part
from headway.envs.base import SingleTurn, reward
from headway.envs.bundled.problems import Row, Split, demonstration, distinct

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Question = Literal["count", "locate", "compare", "color"]
COLORS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220)}
SHAPES = ("circle", "square", "triangle")
_LETTERS = "ABCDEFGH"
Cell = tuple[int, int, str, str]
"""Row, column, color and shape."""


class Grid(SingleTurn):
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
        if not questions or set(questions) - set(get_args(Question)):
            raise UsageError(f"grid: questions must be some of {', '.join(get_args(Question))} (got {list(questions)})")
        self._size, self._cell = size, cell
        self._tasks = distinct(
            lambda rng: _problem(rng, size, rng.choice(list(questions))), str, num_tasks, split=split, seed=seed
        )

    def tasks(self) -> Sequence[Task]:
        return [Task(str(number), problem) for number, problem in enumerate(self._tasks)]

    def prompt(self, task: Task) -> list[Message]:
        cells = tuple(tuple(cell) for cell in task.data["cells"])
        image = draw(cells, self._size, self._cell)
        question = {"type": "text", "text": task.data["question"]}
        return as_messages({"role": "user", "content": [image_part(image), question]})

    @reward
    def correct(self, task: Task, answer: str) -> float:
        return float(answer.strip().lower() == task.data["answer"].lower())


def demonstrations(n: int, seed: int = 0, wrong_share: float = 0.0, **args: Any) -> list[Row]:
    """`n` conversations, none of them a task of the eval split. A share of them mistakes the right answer for the next
    one, in the order of the alphabet, that questions of its kind have."""
    environment = Grid(num_tasks=n, seed=seed, split="train", **args)
    rng = random.Random(seed)
    answers = defaultdict[str, set[str]](set)
    for task in environment.tasks():
        answers[_kind(task)].add(task.data["answer"])
    rows = []
    for task in environment.tasks():
        answer, known = task.data["answer"], sorted(answers[_kind(task)])
        if rng.random() < wrong_share:
            answer = known[(known.index(answer) + 1) % len(known)]
        rows.append(demonstration([*environment.prompt(task), Message("assistant", answer)]))
    return rows


def _kind(task: Task) -> str:
    """The first word of the question."""
    return str(task.data["question"].partition(" ")[0])


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
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise UsageError(f"images need a package: {install_command('vision')}") from None
    image = Image.new("RGB", (size * cell, size * cell), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    for line in range(1, size):
        pen.line([(line * cell, 0), (line * cell, size * cell)], fill=(200, 200, 200))
        pen.line([(0, line * cell), (size * cell, line * cell)], fill=(200, 200, 200))
    for row, column, color, shape in cells:
        _draw_shape(pen, (column * cell, row * cell), cell, COLORS[color], shape)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


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
