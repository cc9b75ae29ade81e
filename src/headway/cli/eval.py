"""`headway eval`: how well a served model does on environments."""

import asyncio
import json
import sys
from argparse import Action, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.base.errors import UsageError
from headway.cli.options import OptionParser, environment_argument, join_environment_arguments

if TYPE_CHECKING:
    from headway.config.orchestrator import EvalEnvSettings
    from headway.orchestrator.evaluation import Round

HELP = """\
usage: headway eval --url URL --env NAME [--args.NAME VALUE ...] [--env NAME ...] [options]

Runs every task of the environments against a server and prints mean rewards, pass@k, errors and lengths. The server
speaks the inference protocol (`headway serve`, or vLLM with --enable-scale-out) or, with --api chat, only OpenAI's chat
API; its key, where it wants one, is read from OPENAI_API_KEY.

  --url URL           the server; may be given several times, episodes go to the least loaded
  --env NAME          a name of `headway env list`, `module:Name` or `file.py:Name`; may be given several times
  --args.NAME VALUE   an argument of the last named environment, such as --args.split eval
  --model FOLDER      whose tokenizer the server uses: a folder or a built-in name (the server tells)
  --family CLASS      its model family, as FILE.py:CLASS or MODULE:CLASS, where Headway does not bring it along
  --name NAME         what the server calls the model (policy)
  --api chat          the server speaks only OpenAI's chat API
  --tasks N           tasks per environment (all)
  --samples K         episodes per task: the k of avg@k and pass@k (1)
  --temperature T     how the model draws (1.0)
  --max-tokens N      tokens per reply (up to the end of the context)
  --concurrency N     episodes at a time (64)
  --timeout S         seconds an episode may take (600)
  --pass-env NAME     an environment variable that the environments need, such as OPENAI_API_KEY
  -o FOLDER           write one JSON line per task there
  --json              print the summary as JSON instead of a table

Examples:
  headway serve tiny &
  headway eval --url http://127.0.0.1:8000 --env reverse-text --args.split eval --tasks 100 --samples 4
"""


def run(argv: list[str]) -> int:
    options = parse(argv)
    round_ = asyncio.run(evaluate_options(options))
    if options.output is not None:
        from headway.orchestrator.evaluation import write_round

        for path in write_round(round_, options.output):
            print(f"wrote {path}", file=sys.stderr)
    if options.json:
        print(json.dumps(round_.summary(), indent=2))
    else:
        _print_table(round_)
    failed = sum(e.error is not None for tasks in round_.results.values() for samples in tasks for e in samples)
    return 1 if failed == sum(len(samples) for tasks in round_.results.values() for samples in tasks) else 0


def parse(argv: Sequence[str]) -> Namespace:
    """Raises UsageError on anything that isn't understood."""
    played = {"tasks": int, "samples": 1, "temperature": 1.0, "max_tokens": int, "concurrency": 64, "timeout": 600.0}
    parser = OptionParser("eval", model=str, family=str, name="policy", json=False, **played)
    parser.add_argument("--url", dest="urls", action="append", default=[])
    parser.add_argument("--env", dest="envs", type=lambda name: (name, {}), action="append", default=[])
    parser.add_argument("--args", type=environment_argument, action=_OfLastEnvironment)
    parser.add_argument("--api", choices=("tokens", "chat"), default="tokens")
    parser.add_argument("--pass-env", action="append", default=[])
    parser.add_argument("-o", dest="output", type=Path)
    options = parser.parse_args(list(join_environment_arguments(argv)))
    if not options.urls:
        raise UsageError("name a server with --url, such as --url http://127.0.0.1:8000; `headway serve` starts one")
    if not options.envs:
        raise UsageError("name an environment with --env; `headway env list` shows them")
    return options


class _OfLastEnvironment(Action):
    """Adds an argument to the environment that was named last."""

    def __call__(self, parser: object, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        if not namespace.envs:
            raise UsageError(f"--args.{values[0]} belongs to an environment; name one with --env before it")
        namespace.envs[-1][1].update([values])


def _settings(options: Namespace) -> "list[EvalEnvSettings]":
    from pydantic import ValidationError

    from headway.config.orchestrator import EvalEnvSettings, SamplingSettings, WorkerSettings

    try:
        sampling = SamplingSettings(temperature=options.temperature, max_tokens=options.max_tokens)
        return [
            EvalEnvSettings(
                id=name,
                args=args,
                sampling=sampling,
                timeout=options.timeout,
                tasks=options.tasks,
                samples=options.samples,
                workers=WorkerSettings(pass_env=options.pass_env),
            )
            for name, args in options.envs
        ]
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"--{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


async def evaluate_options(options: Namespace) -> "Round":
    """Run the round that parsed options ask for."""
    from headway.monitor.progress import progress_bar
    from headway.orchestrator.run import resolve_folder
    from headway.orchestrator.standalone import evaluate
    from headway.rendering.served import model_of_servers
    from headway.transport.control.tokens import find_token

    if options.api == "chat":
        folder = resolve_folder(options.model or "tiny")  # only to count tokens
    else:
        given = resolve_folder(options.model) if options.model else None
        folder = await model_of_servers(options.urls, given, find_token())
    return await evaluate(
        _settings(options),
        options.urls,
        model=folder,
        renderer="auto",
        family=options.family,
        policy=options.name,
        api=options.api,
        concurrency=options.concurrency,
        token=find_token() if options.api == "tokens" else None,
        progress=lambda total: progress_bar("evaluating", total),
    )


def _print_table(round_: "Round") -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from headway.orchestrator.scores import summarize

    summaries = {env: summarize([s for s in tasks if s]) for env, tasks in round_.results.items()}
    columns = sorted({name for summary in summaries.values() for name in summary if name.startswith("pass@")}, key=_k)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("environment", "episodes", "avg", *columns, "errors", "truncated", "tokens"):
        table.add_column(name, no_wrap=True)
    for env, summary in summaries.items():
        shares = [f"{summary[name]:.3f}" if name in summary else "-" for name in columns]
        table.add_row(
            env,
            f"{summary['episodes']:.0f}",
            f"{summary['avg']:.3f}",
            *shares,
            f"{summary['errors']:.1%}",
            f"{summary['truncated']:.1%}",
            f"{summary['length']:.0f}",
        )
    Console().print(table)
    for env, tasks in round_.results.items():
        reasons = {f"{e.error.kind}: {e.error.message}" for samples in tasks for e in samples if e.error}
        for reason in sorted(reasons)[:5]:
            print(f"{env}: {reason}", file=sys.stderr)


def _k(name: str) -> int:
    return int(name.removeprefix("pass@"))
