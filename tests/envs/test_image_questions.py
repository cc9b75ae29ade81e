"""Questions about images of a folder: read row by row, judged by text or number, with errors that name the row."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headway.base.errors import UsageError
from headway.core.images import data_url
from headway.envs.bundled.image_questions import ImageQuestions, last_number
from headway.envs.registry import load_environment


def drawn(shade: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (16, 16), (shade, 7, 7)).save(stream, "PNG")
    return stream.getvalue()


def write(folder: Path, *rows: Any) -> str:
    (folder / "a.png").write_bytes(drawn(1))
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "questions.jsonl")


def row(**changes: Any) -> dict[str, Any]:
    return {"image": "a.png", "question": "How many?", "answer": "1,200"} | changes


def test_rows_become_prompts_with_their_images(tmp_path: Path) -> None:
    path = write(tmp_path, row(), row(image=["a.png", data_url(drawn(2))], question="And now?"))
    environment = load_environment("image-questions", {"path": path, "system": "Answer."})
    assert isinstance(environment, ImageQuestions)
    one, two = (environment.prompt(task) for task in environment.tasks())
    assert [message.role for message in one] == ["system", "user"]
    assert [image.data for image in one[1].images] == [drawn(1)] and one[1].content == "How many?"
    assert [image.data for image in two[1].images] == [drawn(1), drawn(2)]


@pytest.mark.parametrize(
    ("compare", "tolerance", "said", "expected"),
    [
        ("exact", 0, " 1,200. ", 1),
        ("exact", 0, "1200", 0),
        ("exact", 0, "it is 1,200", 0),
        ("number", 0, "6 x 200 = 1200.0", 1),
        ("number", 0, "1200 or 1300", 0),
        ("number", 0, "none", 0),
        ("number", 0.01, "1211", 1),
        ("number", 0.01, "1213", 0),
    ],
)
def test_replies_are_judged(compare: str, tolerance: float, said: str, expected: float, tmp_path: Path) -> None:
    environment = ImageQuestions(write(tmp_path, row()), compare=compare, tolerance=tolerance)  # type: ignore[arg-type]
    assert environment.correct(environment.tasks()[0], said) == expected


def test_numbers_are_found_in_texts() -> None:
    assert [last_number(text) for text in ("-3", "a 1e3.", "2, 5", ".5", "v1.5x", "")] == [-3, 1000, 5, 0.5, 1.5, None]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (row(image="b.png"), "'b.png' can't be read"),
        (row(image="../a.png"), "not in the folder"),
        (row(image="http://example.com/a.png"), "nothing is fetched"),
        (row(image=["a.png"] * 65), "too many"),
        (row(answer=None), "has no 'answer', but answer, image, question"),
        (row(answer="many"), "'many' is no number"),
        ([1], "not a JSON object"),
    ],
)
def test_errors_name_the_row(bad: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"questions\.jsonl:2: .*{reason}"):
        ImageQuestions(write(tmp_path, row(), bad), compare="number")


def test_splits_have_no_row_in_common(tmp_path: Path) -> None:
    path = write(tmp_path, *(row(question=f"Question {number}?") for number in range(60)))
    train, held_out = (ImageQuestions(path, split=split).tasks() for split in ("train", "eval"))  # type: ignore[arg-type]
    assert len(train) + len(held_out) == 60 and 2 <= len(held_out) <= 16
    assert not {task.id for task in train} & {task.id for task in held_out}
    assert len(ImageQuestions(path, num_tasks=5).tasks()) == 5
    again = ImageQuestions(path).tasks()
    assert list(again) == list(ImageQuestions(path).tasks()) and len({task.id for task in again}) == len(again)
