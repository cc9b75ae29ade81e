"""The template of a package that brings an environment: `headway env new` writes it, and it works as it is."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

from headway.base.errors import UsageError
from headway.base.files import write_atomic
from headway.envs.bundled import ENVIRONMENTS

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
description = "An environment for Headway"
requires-python = ">=3.11"
dependencies = []  # what your environment imports, except Headway itself

# The names by which settings find the environments of this package.
[project.entry-points."headway.environments"]
{name} = "{module}.environment:{cls}"

[tool.setuptools.package-data]
{module} = ["*.jsonl"]
"""

INIT = '''\
"""An environment for Headway."""
'''

ENVIRONMENT = '''\
"""Write the vowels of a word. Replace words, prompt and rewards by your own."""

from pathlib import Path

from headway.envs.base import SingleTurn, Task, reward
from headway.envs.tasks import Split, read_tasks

TASKS = Path(__file__).with_name("tasks.jsonl")


class {cls}(SingleTurn):
    """The user sends a word and wants its vowels. Words of `split = "eval"` never occur in training."""

    system = "Write the vowels of the word, in order."

    def __init__(self, split: Split = "train") -> None:
        self._tasks = read_tasks(TASKS, id="word", split=split)

    def tasks(self) -> list[Task]:
        return self._tasks

    def prompt(self, task: Task) -> str:
        return task.data["word"]

    @reward(within=(0, 1))
    def exact(self, task: Task, answer: str) -> float:
        return float(answer.strip() == task.data["vowels"])

    @reward(weight=0.5, within=(0, 1))
    def share(self, task: Task, answer: str) -> float:
        """Partial credit, so that a model that never hits the answer can still improve."""
        said = answer.strip()[:100]  # a reply may be endless
        return sum(letter in task.data["vowels"] for letter in said) / max(1, len(said))


def demonstrations(n: int, seed: int = 0) -> list[dict[str, object]]:
    """Conversations that warm a model up: `headway env demos {name} -o demos.jsonl`, then `headway sft`."""
    environment = {cls}()
    tasks = environment.tasks()
    return [
        {{
            "messages": [
                {{"role": "system", "content": environment.system}},
                {{"role": "user", "content": environment.prompt(task)}},
                {{"role": "assistant", "content": task.data["vowels"]}},
            ]
        }}
        for task in (tasks[(seed + i) % len(tasks)] for i in range(n))
    ]
'''

TESTS = """\
from {module}.environment import {cls}

from headway.envs.testing import play


def test_the_right_answer_gets_the_whole_reward() -> None:
    environment = {cls}()
    task = environment.tasks()[0]
    (trace,) = play(environment, task, task.data["vowels"])
    assert trace.reward == 1.5


def test_anything_else_gets_less() -> None:
    for answer in ("", "zzz", "a" * 100_000):
        (trace,) = play({cls}(), 0, answer)
        assert 0 <= trace.reward < 1.5


def test_what_is_kept_for_evaluation_is_not_trained_on() -> None:
    train, held_out = ({{task.id for task in {cls}(split=split).tasks()}} for split in ("train", "eval"))
    assert train and held_out and not train & held_out
"""

SETTINGS = """\
# A first run, from the untrained built-in model, on two CPU cores: headway rl @ {name}/rl.toml
max_steps = 60
seq_len = 256

[model]
path = "tiny"

[trainer.optim]
lr = 1e-3

[orchestrator]
batch_size = 64
group_size = 8

[orchestrator.sampling]
max_tokens = 16

[[orchestrator.envs]]
id = "{name}"

[[orchestrator.eval.envs]]
id = "{name}"
name = "held-out"
args = {{ split = "eval" }}
"""

README = """\
# {name}

An environment for Headway: the user sends a word and wants its vowels.

- `src/{module}/environment.py`: prompt and rewards
- `src/{module}/tasks.jsonl`: one task per line
- `tests/`: `PYTHONPATH=src python -m pytest tests`
- `rl.toml`: settings of a first run

```bash
headway env check .                      # does it keep the rules?
headway env add .                        # install it, and lock what was installed
headway env try {name}                   # play it by hand
headway rl @ rl.toml                     # train on it
headway env publish . --index ../index   # give it to others: a folder that any web server can serve
```

Change `version` in `pyproject.toml` with every change that you publish.
"""

WORDS = (
    *("apple", "banana", "cherry", "orange", "lemon", "melon", "grape", "olive", "pepper", "potato", "tomato"),
    *("river", "mountain", "forest", "island", "ocean", "valley", "desert", "meadow", "garden", "harbor", "bridge"),
    *("window", "table", "kitchen", "candle", "mirror", "pillow", "basket", "ladder", "hammer", "pencil", "paper"),
    *("guitar", "violin", "piano", "trumpet", "animal", "rabbit", "turtle", "monkey", "spider", "eagle", "falcon"),
)


def write_template(name: str, parent: Path) -> Path:
    """Write the package `name` into a new folder of `parent`, and return it. Raises UsageError on a bad name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a package: use small letters, digits and single hyphens (word-sums)")
    folder, module = parent / name, name.replace("-", "_")
    if folder.exists():
        raise UsageError(f"{folder} already exists; choose another name, or remove it")
    if find_spec(module) is not None or name in ENVIRONMENTS:
        raise UsageError(f"there is a module or an environment {name} already; choose another name for the package")
    words = {"name": name, "module": module, "cls": "".join(part.capitalize() for part in name.split("-"))}
    code = folder / "src" / module
    files = {
        folder / "pyproject.toml": PROJECT.format(**words),
        folder / "README.md": README.format(**words),
        folder / "rl.toml": SETTINGS.format(**words),
        folder / "tests" / "test_environment.py": TESTS.format(**words),
        code / "__init__.py": INIT,
        code / "environment.py": ENVIRONMENT.format(**words),
        code / "tasks.jsonl": "".join(json.dumps(_row(word)) + "\n" for word in WORDS),
    }
    for file, text in files.items():
        write_atomic(file, text)
    return folder


def _row(word: str) -> dict[str, str]:
    return {"word": word, "vowels": "".join(letter for letter in word if letter in "aeiou")}
