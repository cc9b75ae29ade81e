"""The examples of this repository as short runs on a CPU, from one model that was warmed up for most of them."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
NO_SYSTEM = ("--args.system", "")
DEMOS = {
    "reverse-text": (["-n", "6000", "--args.copy_share", "0.5"], ()),
    "calculator": (["-n", "1500", "--args.guess_share", "0.5", "--args.largest", "30", "--args.system", "null"], ()),
    "code": (["-n", "3000", "--args.stubborn_share", "0.7"], ()),
    "sort-words": (
        ["-n", "3000", "--args.copy_share", "0.5", "--args.rounds", "3", "--args.words", "1", "--args.word_len", "2"],
        NO_SYSTEM,
    ),
    "wordle": (
        [
            "-n",
            "3000",
            "--args.careless_share",
            "0.5",
            "--args.methodical",
            "true",
            "--args.length",
            "2",
            "--args.alphabet",
            "abcd",
        ],
        ("--args.guesses", "5", *NO_SYSTEM),
    ),
    "kuhn-poker": (["-n", "2000", "--args.sensible_share", "0.7"], NO_SYSTEM),
    "reasoning-gym": (
        ["-n", "3000", "--seed", "7", "--args.dataset", "chain_sum", "--args.wrong_share", "0.3"],
        ("--args.config", '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}', *NO_SYSTEM),
    ),
}
"""Demonstrations of mixed quality by environment, as the examples' pages have them, and fewer."""
CHAIN_SUM = """[{ id = "reasoning-gym", name = "chain-sum", args = { dataset = "chain_sum", num_tasks = 2000, 
system = "", config = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 } } }]"""
"""The task of the example, with problems that a tiny model learns."""
SHORT = ["--max_steps", "25", "--orchestrator.batch_size", "64"]
CLEAN = (
    "reverse_text",
    "calculator",
    "code_repair",
    "sort_words",
    "wordle",
    "kuhn_poker",
    "any_agent",
    "chain_sum",
    "distill",
    "moe",
    "notebook",
    "bring_your_own",
)
STEPS = {"any_agent": "12"}
MODELS = ("warm-up", "moe-warm-up", "teacher")
"""Models that runs start from, the slowest to make first."""


class Example:
    """Makes runs of the examples in a folder. `headway` runs a command."""

    def __init__(self, folder: Path, headway: Callable[..., None]) -> None:
        self.folder, self.headway = folder, headway

    def make(self, name: str) -> None:
        special = getattr(self, f"_{name}", None)
        if special is not None:
            special()
        else:
            self._rl(name, f"examples/{name}/rl.toml", "--model.path", str(self._warm_model()))

    def _rl(self, name: str, settings: str, *flags: str) -> None:
        place = ["--run.output_dir", str(self.folder), "--run.name", name, "--orchestrator.eval.interval", "1000"]
        steps = ["--max_steps", STEPS[name]] if name in STEPS else []
        self.headway("rl", "@", settings, *SHORT, *steps, *flags, *place)

    def _sft(self, name: str, data: Path, *flags: str) -> Path:
        """Fine-tune, unless that was done before; the folder of the checkpoint."""
        exports = self.folder / name / "exports"
        if not exports.exists():
            place = ["--run.output_dir", str(self.folder), "--run.name", name]
            self.headway("sft", "@", "examples/warm_up.toml", "--data.path", str(data), *flags, *place)
        return sorted(exports.iterdir())[-1]

    def prepare(self, name: str) -> None:
        """Fine-tune one of the models that runs start from, unless that was done before."""
        {"warm-up": self._warm_model, "moe-warm-up": self._moe_model, "teacher": self._teacher}[name]()

    def _demonstrations(self, name: str, *flags: str, file_name: str = "") -> Path:
        file = self.folder / f"{file_name or name}.jsonl"
        if not file.exists():
            self.headway("env", "demos", name, "-o", str(file), *flags)
        return file

    def _warm_model(self) -> Path:
        rows = [
            row for name, (flags, more) in DEMOS.items() for row in self._demonstrations(name, *flags, *more).open()
        ]
        random.Random(0).shuffle(rows)
        mixed = self.folder / "mixed.jsonl"
        mixed.write_text("".join(rows))
        flags = ["--batch_tokens", "2048", "--seq_len", "2048", "--max_steps", "600"]
        return self._sft("warm-up", mixed, *flags, "--trainer.schedule.decay_steps", "300")

    def _chain_sum(self) -> None:
        lengths = ["--orchestrator.group_size", "8", "--orchestrator.sampling.max_tokens", "8", "--seq_len", "256"]
        model = ["--model.path", str(self._warm_model()), "--trainer.optim.lr", "1e-4"]
        self._rl(
            "chain_sum", "examples/base.toml", *model, *lengths, "--orchestrator.envs", CHAIN_SUM.replace("\n", " ")
        )

    def _moe_model(self) -> Path:
        data = self._demonstrations("reverse-text", *DEMOS["reverse-text"][0], file_name="moe")
        flags = ["--model.path", "tiny-moe", "--max_steps", "250", "--trainer.schedule.decay_steps", "125"]
        return self._sft("moe-warm-up", data, *flags)

    def _moe(self) -> None:
        self._rl("moe", "examples/moe/rl.toml", "--model.path", str(self._moe_model()))

    def _teacher(self) -> Path:
        untrained = self.folder / "untrained-teacher"
        if not untrained.exists():
            subprocess.run([sys.executable, str(EXAMPLES / "distill" / "teacher.py"), str(untrained)], check=True)
        data = self._demonstrations("reverse-text", "-n", "10000", "--seed", "1", file_name="right")
        flags = ["--max_steps", "150", "--trainer.schedule.decay_steps", "75"]
        return self._sft("teacher", data, "--model.path", str(untrained), *flags)

    def _distill(self) -> None:
        with serving(self._teacher()) as url:
            algorithm = ["--orchestrator.algorithm.teacher.base_url", url]
            self._rl("distill", "examples/distill/rl.toml", "--model.path", str(self._warm_model()), *algorithm)

    def _notebook(self) -> None:
        """Run the notebook's cells up to the end of its run, as a program."""
        cells = json.loads((EXAMPLES / "notebook" / "vowels.ipynb").read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        last = next(index for index, text in enumerate(code) if "run.wait()" in text)
        program = "\n\n".join(code[: last + 1]).replace("headway.settings(", "headway.settings(run=PLACE, ")
        file = self.folder / "notebook.py"
        place = {"name": "notebook", "output_dir": str(self.folder)}
        file.write_text(f"PLACE = {place!r}\n{program}\n")
        subprocess.run([sys.executable, str(file)], check=True, stdout=subprocess.DEVNULL)

    def _bring_your_own(self) -> None:
        place = ["--run.output_dir", str(self.folder), "--run.name", "bring_your_own"]
        self.headway("rl", "@", "examples/bring_your_own/run.toml", "--max_steps", "12", *place)


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """Serve a model; its address."""
    command = [sys.executable, "-m", "headway.cli.main", "serve", str(model), "--port", "8139"]
    log = model.parent / "serve.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while "http://" not in log.read_text() and server.poll() is None:
                time.sleep(0.5)
            yield "http://127.0.0.1:8139"
        finally:
            server.terminate()
            server.wait()
