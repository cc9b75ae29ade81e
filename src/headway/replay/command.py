"""`headway replay` from the journal to its report: batches again, weights again, each compared with the run's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from headway.base.devices import resolve_device
from headway.base.errors import UsageError
from headway.config.commands import write_process_settings
from headway.config.loader import load_settings
from headway.config.rl import RlSettings
from headway.core.runs import RunPaths
from headway.launch.fork import fork_run
from headway.launch.placement import visible_gpus
from headway.monitor.runs import create_run
from headway.replay.build import ReplayedBatch, replay_batches
from headway.replay.lives import History
from headway.replay.training import ReplayTrainer, replay_settings
from headway.transport.control.folder import FolderControl

Say = Callable[[str], None]

ON_GPU = "Weights differ though batches do not, as is to be expected: a GPU adds up sums in another order each time."
ON_CPU = (
    "Weights differ though batches do not: was the run trained on another kind of CPU, with another number of threads "
    "or another version of torch (run.json says which), or were settings of the trainer changed by --resume?"
)


@dataclass(slots=True)
class Comparison:
    """The findings of a replay: steps whose batch or weights have the run's bits, those that differ, and those that
    nothing is known of."""

    batches: dict[int, bool | None] = field(default_factory=dict)
    weights: dict[int, bool | None] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        return False not in self.batches.values() and False not in self.weights.values()


def replay_run(
    paths: RunPaths,
    history: History,
    say: Say,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    train: bool = True,
) -> Comparison:
    """Replay a run's decisions, and with `train` its training after `from_step`, and compare both with the run."""
    from_step = history.first_step if from_step is None else from_step
    found = Comparison()
    steps = choose_steps(paths, history, from_step, to_step, train)
    settings = load_settings(RlSettings, ["@", str(paths.config / "rl.toml")]).settings
    batches = (batch for batch in replay_batches(paths, history) if batch.batch.step in steps)
    if not train:
        for replayed in batches:
            found.batches[replayed.batch.step] = replayed.identical
            say(_line(replayed, None))
        return found
    if (newest := FolderControl(paths).latest()) is not None:  # which the orchestrator may not have seen any more
        history.fingerprints.setdefault(newest.version, newest.fingerprint)
    on_gpu = resolve_device(settings.placement.device, bool(visible_gpus())) != "cpu"
    with _trainer(paths, settings, from_step) as trainer:
        say("starting the trainer")
        first = trainer.start(from_step)
        found.weights[from_step] = _same(first, history.fingerprints.get(from_step))
        for replayed in batches:
            step = replayed.batch.step
            fingerprint = trainer.train(replayed.batch, replayed.next.state)
            found.batches[step] = replayed.identical
            found.weights[step] = _same(fingerprint, history.fingerprints.get(step))
            say(_line(replayed, found.weights[step]))
        trainer.stop()
    if False in found.weights.values() and False not in found.batches.values():
        say(ON_GPU if on_gpu else ON_CPU)
    return found


def choose_steps(paths: RunPaths, history: History, from_step: int, to_step: int | None, train: bool) -> frozenset[int]:
    known = history.steps
    if not known:
        raise UsageError(f"{paths.root}: the journal has no batch yet")
    checkpoints = paths.complete_checkpoints()
    if from_step and train and from_step not in checkpoints:
        there = ", ".join(map(str, checkpoints)) or "none"
        raise UsageError(
            f"training cannot start after step {from_step}: the run has no checkpoint of it (there are: {there}); keep "
            "more with trainer.checkpoints.keep_interval"
        )
    last = min(to_step or known[-1], known[-1])
    wanted = range(from_step + 1, last + 1)
    if not wanted:
        raise UsageError(f"there is nothing to replay after step {from_step}: the journal ends with step {known[-1]}")
    if missing := sorted(set(wanted) - set(known)):
        raise UsageError(
            f"the journal lacks step {missing[0]}: it was full, or lost with its host; replay from a checkpoint after "
            "that with --from-step"
        )
    return frozenset(wanted)


@contextmanager
def _trainer(origin: RunPaths, settings: RlSettings, from_step: int) -> Iterator[ReplayTrainer]:
    """A trainer in a folder that is gone afterwards."""
    with (
        TemporaryDirectory(prefix="headway-replay-") as folder,
        trainer_in(origin, settings, from_step, Path(folder)) as trainer,
    ):
        yield trainer


@contextmanager
def trainer_in(origin: RunPaths, settings: RlSettings, from_step: int, folder: Path) -> Iterator[ReplayTrainer]:
    """A trainer in a new run below `folder`, with the origin's checkpoint of `from_step`."""
    run = settings.run.model_copy(update={"name": settings.run.name or "replay", "output_dir": folder})
    paths = create_run(run, "replay")
    settings = replay_settings(settings, paths)
    write_process_settings(settings, paths.config)
    if from_step:
        fork_run(origin, from_step, paths)
    trainer = ReplayTrainer(settings, paths)
    try:
        yield trainer
    finally:
        trainer.kill()


def summary(found: Comparison, last: int) -> list[str]:
    """Sum up a comparison. `last` is the step that the journal ends with."""
    lines = [_summary("batches", found.batches)]
    if found.weights:
        lines.append(_summary("weights after steps", found.weights))
    return [*lines, f"the journal ends with step {last}"]


def _summary(what: str, steps: dict[int, bool | None]) -> str:
    different = [step for step, same in steps.items() if same is False]
    unknown = [step for step, same in steps.items() if same is None]
    text = f"{what}: {sum(same is True for same in steps.values())} of {len(steps)} bit-identical with the run's"
    if different:
        text += f"; the first that differs is {different[0]}"
    if unknown:
        text += f"; of {len(unknown)} the run has no record (such as {unknown[0]})"
    return text


def _same(mine: str, theirs: str | None) -> bool | None:
    return None if theirs is None else mine == theirs


def _line(replayed: ReplayedBatch, weights: bool | None) -> str:
    text = f"step {replayed.batch.step}: {len(replayed.next.groups)} groups, batch {_word(replayed.identical)}"
    return text if weights is None else f"{text}, weights {_word(weights)}"


def _word(identical: bool | None) -> str:
    return {True: "bit-identical", False: "DIFFERENT", None: "not recorded"}[identical]
