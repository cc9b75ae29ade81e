"""Starting a run from a checkpoint of another one."""

import shutil
from pathlib import Path

from headway.base.errors import UsageError
from headway.base.files import atomic_directory
from headway.core.runs import RunPaths


def parse_checkpoint(text: str) -> tuple[RunPaths, int]:
    """`RUN@STEP` or `RUN` (its newest checkpoint). Raises UsageError naming the steps there are."""
    folder, _, step = text.partition("@")
    paths = RunPaths(Path(folder))
    if not paths.root.is_dir():
        raise UsageError(f"{folder} is not a run folder")
    steps = paths.complete_checkpoints()
    if not steps:
        raise UsageError(f"{folder} has no complete checkpoint yet")
    if not step:
        return paths, steps[-1]
    if not step.isdigit() or int(step) not in steps:
        raise UsageError(f"{folder} has no checkpoint at step {step}; it has {', '.join(map(str, steps))}")
    return paths, int(step)


def check_fork(origin: RunPaths, step: int, max_steps: int) -> None:
    """Raise UsageError where a run that starts from this checkpoint would have nothing to train."""
    if step >= max_steps:
        raise UsageError(
            f"{origin.root}@{step} has step {step} behind it, and max_steps is {max_steps}: steps are counted on from "
            f"there; give --max_steps more than {step}, or an earlier checkpoint"
        )


def fork_run(origin: RunPaths, step: int, paths: RunPaths) -> None:
    """Give the new run `origin`'s checkpoint at `step` and the orchestrator's state that belongs to it."""
    for source, target in (
        (origin.checkpoint(step), paths.checkpoint(step)),
        (origin.batch(step), paths.batch(step)),
    ):
        if source.is_dir():
            with atomic_directory(target) as folder:
                shutil.copytree(source, folder, dirs_exist_ok=True)
