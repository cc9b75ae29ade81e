"""`headway eval`: how well a served model does on environments."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.config.orchestrator import EvalEnvSettings
    from headway.orchestrator.evaluation import EvalEnv, Round

HELP = """\
usage: headway eval --url URL --env NAME [--args.NAME VALUE ...] [--env NAME ...] [options]

Runs every task of the environments against a server and prints mean rewards, pass@k, errors and lengths. The server
speaks the inference protocol (`headway serve`, or vLLM with --enable-scale-out) or, with --api chat, only OpenAI's chat
API; its key, where it wants one, is read from OPENAI_API_KEY.

  --url URL           the server; may be given several times, episodes go to the least loaded
  --env NAME          a name of `headway env list`, `module:Name` or `file.py:Name`; may be given several times
  --args.NAME VALUE   an argument of the last named environment, such as --args.split eval
  --model FOLDER      whose tokenizer the server uses: a folder or a built-in name (tiny)
  --name NAME         what the server calls the model (policy)
  --api chat          the server speaks only OpenAI's chat API
  --tasks N           tasks per environment (all)
  --samples K         episodes per task: the k of avg@k and pass@k (1)
  --temperature T     how the model draws (1.0)
  --max-tokens N      tokens per reply (up to the end of the context)
  --concurrency N     episodes at a time (64)
  --timeout S         seconds an episode may take (600)
  -o FOLDER           write one JSON line per task there
  --json              print the summary as JSON instead of a table

Examples:
  headway serve tiny &
  headway eval --url http://127.0.0.1:8000 --env reverse-text --args.split eval --tasks 100 --samples 4
"""


@dataclass
class Options:
    urls: list[str] = field(default_factory=list)
    envs: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    model: str = "tiny"
    name: str = "policy"
    api: str = "tokens"
    tasks: int | None = None
    samples: int = 1
    temperature: float = 1.0
    max_tokens: int | None = None
    concurrency: int = 64
    timeout: float = 600.0
    output: Path | None = None
    json: bool = False


VALUES: dict[str, tuple[str, type]] = {
    "--model": ("model", str),
    "--name": ("name", str),
    "--api": ("api", str),
    "--tasks": ("tasks", int),
    "--samples": ("samples", int),
    "--temperature": ("temperature", float),
    "--max-tokens": ("max_tokens", int),
    "--concurrency": ("concurrency", int),
    "--timeout": ("timeout", float),
    "-o": ("output", Path),
}


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    options = parse(argv)
    round_, envs = asyncio.run(_evaluate(options))
    if options.output is not None:
        from headway.orchestrator.evaluation import write_round

        for path in write_round(round_, envs, options.output):
            print(f"wrote {path}", file=sys.stderr)
    if options.json:
        print(json.dumps(round_.summary(), indent=2))
    else:
        _print_table(round_)
    failed = sum(e.error is not None for tasks in round_.results.values() for samples in tasks for e in samples)
    return 1 if failed == sum(len(samples) for tasks in round_.results.values() for samples in tasks) else 0


def parse(argv: Sequence[str]) -> Options:
    """Raises UsageError on anything that isn't understood."""
    options, words = Options(), list(argv)
    while words:
        word, _, given = words.pop(0).partition("=")
        if word == "--json":
            options.json = True
            continue
        if not given and not words:
            raise UsageError(f"{word} needs a value; see `headway eval --help`")
        value = given or words.pop(0)
        if word == "--url":
            options.urls.append(value)
        elif word == "--env":
            options.envs.append((value, {}))
        elif word.startswith("--args."):
            _last_env(options, word)[word.removeprefix("--args.")] = _literal(value)
        elif word in VALUES:
            name, kind = VALUES[word]
            setattr(options, name, _convert(kind, value, word))
        else:
            raise UsageError(f"unknown option {word}; see `headway eval --help`")
    if not options.urls:
        raise UsageError("name a server with --url, such as --url http://127.0.0.1:8000; `headway serve` starts one")
    if options.api not in ("tokens", "chat"):
        raise UsageError(f"--api is tokens or chat, not {options.api!r}")
    if not options.envs:
        raise UsageError("name an environment with --env; `headway env list` shows them")
    return options


def _last_env(options: Options, word: str) -> dict[str, Any]:
    if not options.envs:
        raise UsageError(f"{word} belongs to an environment; name one with --env before it")
    return options.envs[-1][1]


def _convert(kind: type, value: str, word: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise UsageError(f"{word} needs a {kind.__name__}, got {value!r}") from None


def _literal(text: str) -> Any:
    """Numbers, booleans, lists and objects as JSON; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _settings(options: Options) -> "list[EvalEnvSettings]":
    from pydantic import ValidationError

    from headway.config.orchestrator import EvalEnvSettings, SamplingSettings

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
            )
            for name, args in options.envs
        ]
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"--{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


async def _evaluate(options: Options) -> "tuple[Round, list[EvalEnv]]":
    from headway.monitor.progress import progress_bar
    from headway.orchestrator.run import resolve_folder
    from headway.orchestrator.standalone import evaluate

    return await evaluate(
        _settings(options),
        options.urls,
        model=resolve_folder(options.model),
        renderer="auto",
        policy=options.name,
        api="chat" if options.api == "chat" else "tokens",
        concurrency=options.concurrency,
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
