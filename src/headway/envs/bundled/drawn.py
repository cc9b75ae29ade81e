"""Questions about images that are drawn from their tasks, so that nothing is stored: what such environments share."""

import io
import random
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headway.base.errors import UsageError
from headway.base.extras import install_command
from headway.core.episodes import Task
from headway.core.messages import Message, as_messages, image_part
from headway.envs.base import SingleTurn, reward
from headway.envs.bundled.problems import Row, demonstration

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

Color = tuple[int, int, int]
COLORS: dict[str, Color] = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220)}
BLACK, GRAY = (0, 0, 0), (200, 200, 200)


class DrawnQuestions(SingleTurn):
    """Problems hold a `question`, its `answer`, and what the subclass draws of them (`picture`)."""

    def __init__(self, problems: Sequence[Mapping[str, Any]]) -> None:
        self._problems = problems

    def tasks(self) -> Sequence[Task]:
        return [Task(str(number), dict(problem)) for number, problem in enumerate(self._problems)]

    def prompt(self, task: Task) -> list[Message]:
        question = {"type": "text", "text": task.data["question"]}
        return as_messages({"role": "user", "content": [image_part(self.picture(task.data)), question]})

    @abstractmethod
    def picture(self, problem: Mapping[str, Any]) -> bytes:
        """Draw the image of a problem, as a PNG."""

    @reward
    def correct(self, task: Task, answer: str) -> float:
        return float(answer.strip().lower() == task.data["answer"].lower())


def demonstrate(environment: DrawnQuestions, seed: int, wrong_share: float) -> list[Row]:
    """One conversation for each task. A share of them mistakes the right answer for the next one, in the order of the
    alphabet, that questions of its kind have."""
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


def check_questions(name: str, asked: Sequence[str], known: Sequence[str]) -> None:
    """Raise UsageError where an environment has no such questions, or is to ask none."""
    if not asked or set(asked) - set(known):
        raise UsageError(f"{name}: questions must be some of {', '.join(known)} (got {list(asked)})")


def blank_image(width: int, height: int, color: Color = (255, 255, 255)) -> "tuple[Image, ImageDraw]":
    """An image and the pen that draws on it. Raises UsageError where the package for images is missing."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise UsageError(f"images need a package: {install_command('vision')}") from None
    image = Image.new("RGB", (width, height), color)
    return image, ImageDraw.Draw(image)


def write(pen: "ImageDraw", at: tuple[float, float], text: str, size: int, color: Color = BLACK) -> None:
    """Write a text around a point."""
    from PIL import ImageFont

    pen.text(at, text, fill=color, font=ImageFont.load_default(size), anchor="mm")


def png(image: "Image") -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
