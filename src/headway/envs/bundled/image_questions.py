"""Questions about images of yours: a folder of images, and a file of questions and answers about them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from headway.base.errors import UsageError
from headway.core.episodes import Task
from headway.core.image_files import read_image_url
from headway.core.images import MOST_IMAGES, image_digest
from headway.core.messages import Message, as_messages, image_part
from headway.core.rows import Row, read_rows
from headway.envs.base import SingleTurn, reward
from headway.envs.tasks import Split, in_split

Comparison = Literal["exact", "number"]
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


class ImageQuestions(SingleTurn):
    """One question about one or several images per row of `path`: a JSONL or Parquet file, or a folder of them.

    The columns `image` (a path in the folder of the row's file, a data URL, or a list of these), `question` and
    `answer` can be renamed. `compare` is how a reply is judged: "exact" asks for the answer itself, without regard to
    case, spaces around it and a period after it; "number" for a reply whose last number is the answer's, within
    `tolerance` of it (relative). With a `split`, one row in eight is kept for "eval", decided by question and images.
    """

    def __init__(
        self,
        path: str,
        *,
        image: str = "image",
        question: str = "question",
        answer: str = "answer",
        compare: Comparison = "exact",
        tolerance: float = 0.0,
        split: Split | None = None,
        num_tasks: int | None = None,
        system: str | None = None,
    ) -> None:
        if compare not in get_args(Comparison):
            raise UsageError(f'image-questions: compare must be "exact" or "number" (got "{compare}")')
        self._number, self._tolerance, self._system = compare == "number", tolerance, system
        found = (self._task(row, image, question, answer) for row in read_rows(path, split or "train"))
        self._tasks = [task for task in found if split is None or in_split(task.data["key"], split)][:num_tasks]

    def tasks(self) -> Sequence[Task]:
        return self._tasks

    def prompt(self, task: Task) -> list[Message]:
        folder = Path(task.data["folder"])
        parts = [image_part(read_image_url(url, folder)) for url in task.data["images"]]
        opening = [] if self._system is None else [Message("system", self._system)]
        question = {"type": "text", "text": task.data["question"]}
        return [*opening, *as_messages({"role": "user", "content": [*parts, question]})]

    @reward
    def correct(self, task: Task, answer: str) -> float:
        wanted = task.data["answer"]
        if not self._number:
            return float(_plain(answer) == _plain(wanted))
        found, number = last_number(answer), last_number(wanted)
        assert number is not None
        return float(found is not None and abs(found - number) <= self._tolerance * abs(number))

    def _task(self, row: Row, image: str, question: str, answer: str) -> Task:
        """Read a row and look at its images. Raises UsageError that names the row."""
        try:
            if row.error is not None:
                raise ValueError(row.error)
            if missing := [name for name in (image, question, answer) if row.data.get(name) in (None, "", [])]:
                raise ValueError(f"has no {missing[0]!r}, but {', '.join(sorted(row.data)) or 'nothing'}")
            urls: list[Any] = row.data[image] if isinstance(row.data[image], list) else [row.data[image]]
            if len(urls) > MOST_IMAGES:
                raise ValueError(f"{len(urls)} images are too many: at most {MOST_IMAGES} are taken")
            digests = [image_digest(read_image_url(url, row.folder)) for url in urls]
            if self._number and last_number(str(row.data[answer])) is None:
                raise ValueError(f"the answer {row.data[answer]!r} is no number")
        except ValueError as error:
            raise UsageError(f"image-questions: {row.where}: {error}") from None
        asked = str(row.data[question])
        data = {"images": urls, "question": asked, "answer": str(row.data[answer]), "folder": str(row.folder)}
        return Task(row.where, data | {"key": "/".join([asked, *digests])})


def last_number(text: str) -> float | None:
    """The last number that a text names; None where it names none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _plain(text: str) -> str:
    return text.strip().removesuffix(".").strip().casefold()
