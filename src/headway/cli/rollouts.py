"""`headway rollouts`: read the episodes that a run was trained on."""

import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.errors import UsageError
from headway.cli.options import OptionParser

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headway.core.episodes import Trace
    from headway.core.messages import Tool
    from headway.core.records import RolloutRecord
    from headway.core.runs import RunPaths

HELP = """\
usage: headway rollouts show RUN [--step N] [--env NAME] [--min-reward R] [--max-reward R] [options]

Shows recorded episodes of a run: what was said, by whom, the tools that were offered, with rewards,
advantages, versions and timings.

  --step N          the batch to look into (the newest)
  --env NAME        only of this environment
  --min-reward R    only episodes with at least this reward
  --max-reward R    only episodes with at most this reward
  --group ID        only of this group (the last letters of its id are enough)
  --untrained       episodes that failed or were dropped while the batch was collected (a few of each cause), with why
  -n N              episodes to show (4)
  --tokens          also show token ids, with the version that sampled them
  --json            print the records as JSON lines

Examples:
  headway rollouts show outputs/my-run
  headway rollouts show outputs/my-run --step 20 --min-reward 1 -n 1
"""


def run(argv: list[str]) -> int:
    from headway.core.records import read_rollouts, recorded_steps
    from headway.monitor.runs import open_run

    options = parse(argv)
    paths = open_run(options.run)
    steps = recorded_steps(paths, untrained=options.untrained)
    if not steps:
        raise UsageError(_nothing_recorded(paths, options))
    step = steps[-1] if options.step is None else options.step
    if step not in steps:
        raise UsageError(f"{options.run} has no record of step {step}; it has {steps[0]} to {steps[-1]}")
    found = islice(matching(read_rollouts(paths, step, untrained=options.untrained), options), options.n)
    return _print_json(found) if options.json else _print(found, step, options)


def _nothing_recorded(paths: "RunPaths", options: Namespace) -> str:
    from headway.core.records import recorded_steps

    if options.untrained:
        return f"{options.run}: no episode failed or was dropped so far"
    if recorded_steps(paths, untrained=True):
        return f"{options.run} has trained no batch yet; --untrained shows the episodes that failed or were dropped"
    return f"{options.run} has no recorded rollouts yet (orchestrator.record_rollouts writes them)"


def parse(argv: Sequence[str]) -> Namespace:
    shown = {"n": 4, "tokens": False, "json": False, "untrained": False}
    wanted = {"step": int, "env": str, "group": "", "min_reward": -math.inf, "max_reward": math.inf}
    parser = OptionParser("rollouts", **wanted, **shown)
    parser.add_argument("action", choices=("show",))
    parser.add_argument("run", type=Path, metavar="RUN")
    return parser.parse_args(argv)


def matching(records: "Iterable[RolloutRecord]", options: Namespace) -> "Iterator[RolloutRecord]":
    for record in records:
        if (
            (options.env is None or record.env == options.env)
            and options.min_reward <= record.reward <= options.max_reward
            and record.group.endswith(options.group)
        ):
            yield record


def _print_json(records: "Iterable[RolloutRecord]") -> int:
    import msgspec

    for record in records:
        print(msgspec.json.encode(record).decode())
    return 0


def _print(records: "Iterable[RolloutRecord]", step: int, options: Namespace) -> int:
    from rich.console import Console, Group
    from rich.panel import Panel

    from headway.core.records import short_group

    console, shown = Console(highlight=False), 0
    for record in records:
        shown += 1
        body = Group(*error_lines(record), *(line for t in record.episode.traces for line in trace_lines(t, options)))
        title = f"step {step}  {record.env}  reward {record.reward:.3f}  {_fate(record)}"
        seconds = "  ".join(f"{name} {value:.2f} s" for name, value in record.episode.timings.items())
        subtitle = f"task {record.episode.task.id}  group {short_group(record.group)}  {seconds}"
        console.print(Panel(body, title=title, subtitle=subtitle, title_align="left"))
    if not shown:
        console.print(f"no episode of step {step} matches")
    return 0


def _fate(record: "RolloutRecord") -> str:
    if record.cause:
        return f"not trained: {record.cause}"
    advantages = ", ".join(f"{sample.advantage:+.3f}" for sample in record.samples) or "not trained"
    return f"advantage {advantages}  lag {record.lag}"


def error_lines(record: "RolloutRecord") -> "Iterator[RenderableType]":
    from rich.text import Text

    if error := record.episode.error:
        yield Text(_printable(f"{error.kind}: {error.message}"), style="red")
        if error.detail:
            yield Text(_printable(error.detail), style="dim")


def trace_lines(trace: "Trace", options: Namespace) -> "Iterator[RenderableType]":
    from rich.text import Text

    parts = "  ".join(f"{name} {value:.3f}" for name, value in trace.rewards.items())
    yield Text(f"{trace.agent}: {trace.reward:.3f}  {parts}" + ("  truncated" if trace.truncated else ""), style="dim")
    if trace.tools:
        yield Text("    tools  ", style="bold").append(_printable(_signatures(trace.tools)), style="not bold")
    for number, branch in enumerate(trace.branches()):
        if number:
            yield Text(f"branch {number + 1}", style="dim")
        for node in (trace.nodes[index] for index in branch):
            if node.message is not None:
                calls = "".join(f"\n{call.name}({call.arguments})" for call in node.message.tool_calls)
                line = Text(f"{node.message.role:>9}  ", style="bold")
                yield line.append(
                    _printable(node.message.content + calls), style="green" if node.sampled else "not bold"
                )
            if options.tokens:
                versions = ", ".join(f"v{version} x {count}" for version, count in node.versions)
                yield Text(f"           {node.token_ids} {versions}", style="dim")
    for name, note in trace.notes.items():
        yield Text(f"{name:>9}  ", style="bold").append(_printable(note), style="cyan not bold")


def _signatures(tools: "Iterable[Tool]") -> str:
    """Write tools as `name(argument, argument)`."""
    return ", ".join(f"{tool.name}({', '.join(tool.parameters.get('properties') or {})})" for tool in tools)


def _printable(text: str) -> str:
    """Replace control characters, which a model may well sample and a terminal would obey."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
