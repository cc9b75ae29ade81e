"""`headway env filter`: the tasks that a model sometimes solves, as a set that a run names."""

import asyncio
import sys
from pathlib import Path

from headway.base.errors import HeadwayError, UsageError
from headway.cli import eval as eval_command
from headway.cli.options import OptionParser


def run(name: str, argv: list[str]) -> int:
    """`argv` are options of this command, and for the rest those of `headway eval`."""
    parser = OptionParser("env filter", min_rate=0.1, max_rate=0.9, by_reward=False)
    parser.add_argument("-o", dest="output", type=Path)
    own, rest = parser.parse_known_args(argv)
    options = eval_command.parse(["--env", name, "--samples", "8", *rest])
    if own.output is None:
        raise UsageError("name the file to write with -o, such as -o kept.jsonl")
    if own.min_rate > own.max_rate:
        raise UsageError(f"--min-rate {own.min_rate:g} is above --max-rate {own.max_rate:g}: no task would be kept")
    from headway.orchestrator.task_sets import task_rate, write_task_set

    round_ = asyncio.run(eval_command.evaluate_options(options))
    (env,) = round_.envs
    pairs = zip(env.tasks, round_.results[env.name], strict=True)
    rates = [task_rate(task, episodes, by_reward=own.by_reward) for task, episodes in pairs]
    known = [rate for rate in rates if rate is not None]
    if not known:
        raise HeadwayError("every episode failed; `headway env try` shows one with its error")
    kept = [rate for rate in known if own.min_rate <= rate.rate <= own.max_rate]
    easy, hard = sum(rate.rate > own.max_rate for rate in known), sum(rate.rate < own.min_rate for rate in known)
    print(
        f"{len(kept)} of {len(rates)} tasks kept: {hard} are too hard (below {own.min_rate:g}), {easy} too easy (above "
        f"{own.max_rate:g}), {len(rates) - len(known)} failed",
        file=sys.stderr,
    )
    if not kept:
        raise HeadwayError("no task is left; widen --min-rate and --max-rate, or take another model or more --samples")
    write_task_set(kept, own.output)
    print(own.output)
    return 0
