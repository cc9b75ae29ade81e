"""`headway env`: which environments there are, what their tasks look like, and how one plays."""

import asyncio
import inspect
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.errors import HeadwayError, UsageError
from headway.cli.options import OptionParser, environment_argument, join_environment_arguments

if TYPE_CHECKING:
    from headway.core.episodes import Task
    from headway.core.messages import Messages
    from headway.envs.base import Environment
    from headway.envs.transcript import Paint

HELP = """\
usage: headway env list
       headway env show NAME [--tasks 3] [--args.NAME VALUE ...]
       headway env try NAME [--task 0] [--url URL] [--tokens] [--args.NAME VALUE ...]
       headway env demos NAME [-n 1000] [-o FILE] [--args.NAME VALUE ...]
       headway env filter NAME --url URL -o FILE [--min-rate 0.1] [--max-rate 0.9] [--args.NAME VALUE ...]
       headway env new NAME
       headway env check NAME|FOLDER [--json] [--tasks 8] [--timeout 10] [--args.NAME VALUE ...]
       headway env publish FOLDER --index FOLDER
       headway env add PACKAGE[==VERSION]|FOLDER|git+URL [--index FOLDER|URL] [--lock FILE] [--sha256 HASH]

list    the environments that are bundled or installed
show    what one is about: its arguments, rewards, tools, and its first tasks
try     play an episode by hand in the terminal, or watch a served model play it
demos   write conversations that warm a model up for it, as JSONL for `headway sft`
filter  let a served model try every task several times, and write the tasks that it sometimes solves as a task set,
        which a run takes by `task_set = "FILE"` in [[orchestrator.envs]]
new     write a package with an environment, tasks, tests and settings, which works as it is
check   try an environment in a process of its own: does it load, are its tasks the same every time, are its rewards
        finite and in their range, how long does a task take, and does it survive replies that are empty, huge or
        garbage? Prints a table with what to do about each failure; the exit code is 1 where something failed
publish build a package as a wheel and add it to an index: a folder that any web server can serve
add     install a package, changing the version of nothing else, and write name, version, hash and source into
        environments.lock; a package whose hash is not the one of its index or lock is refused. Without a package,
        install all that the lock names

NAME is a name from the list, an import path `module:Name`, or a file `path.py:Name`.

  --args.NAME VALUE   an argument of the environment, such as --args.split eval
  --tasks N           how many tasks to show (3)
  --task N            which task to play, counted from 0 (0)
  --url URL           the server that plays; without it you do
  --model FOLDER      whose tokenizer the server uses: a folder or a built-in name (the server tells)
  --family CLASS      its model family, as FILE.py:CLASS or MODULE:CLASS, where Headway does not bring it along
  --tokens            show every token, those that the model sampled in green ([brackets] without color)
  --max-tokens N      tokens per reply (64)
  --temperature T     how the model draws (1.0)
  -n N, --seed N      how many conversations to write (1000), and their seed (0)
  -o FILE             where to write them (standard output)
  --min-rate R        filter: keep tasks of which at least this share of episodes was solved, with reward 1 (0.1)
  --max-rate R        filter: and at most this share (0.9)
  --by-reward         filter: judge by the mean reward instead, for environments with partial rewards
  --samples K         filter: episodes per task (8); it takes the other options of `headway eval`, too
  --json              check: print the findings as JSON
  --timeout S         check: seconds that an episode may take, without the model (10)
  --pass-env NAME     check: an environment variable that the environment needs, such as a judge's key
  --index PLACE       publish: the folder of the index; add: its folder or address (default: where pip looks)
  --lock FILE         add: the lock to write (environments.lock); `headway rl` looks beside its settings files
  --sha256 HASH       add: the hash that the package must have, for an index without HTTPS

Examples:
  headway env show wordle --args.length 4
  headway env try kuhn-poker                  # you play both seats
  headway serve tiny &                        # then, when it serves:
  headway env try calculator --url http://127.0.0.1:8000 --tokens
  headway env demos calculator -n 5000 --args.guess_share 0.3 -o demos.jsonl
  headway env filter calculator --url http://127.0.0.1:8000 --samples 8 -o kept.jsonl
  headway env new word-sums                   # a package of your own, then:
  headway env check ./word-sums
  headway env publish ./word-sums --index ./index
  headway env add word-sums==0.1.0 --index ./index
"""


def run(argv: list[str]) -> int:
    match argv:
        case ["list"]:
            _list()
        case ["show", name, *rest]:
            _show(name, parse(rest))
        case ["try", name, *rest]:
            return asyncio.run(_try(name, parse(rest)))
        case ["demos", name, *rest]:
            _demos(name, parse(rest))
        case ["filter", name, *rest]:
            from headway.cli import env_filter

            return env_filter.run(name, rest)
        case ["check", name, *rest]:
            from headway.cli import env_check

            return env_check.run(name, rest)
        case ["new" | "publish" | "add" as command, *rest]:
            from headway.cli import env_packages

            commands = {"new": env_packages.new, "publish": env_packages.publish, "add": env_packages.add}
            return commands[command](rest)
        case _:
            raise UsageError(
                "`headway env` takes list, show NAME, try NAME, demos NAME, filter NAME, new NAME, check NAME, publish "
                "FOLDER or add PACKAGE; see `headway env --help`"
            )
    return 0


def parse(argv: list[str]) -> Namespace:
    played = {"task": 0, "url": str, "tokens": False, "max_tokens": 64, "temperature": 1.0}
    parser = OptionParser("env", model=str, family=str, tasks=3, n=1000, seed=0, **played)
    parser.add_argument("--args", type=environment_argument, action="append", default=[])
    parser.add_argument("-o", dest="output", type=Path)
    options = parser.parse_args(list(join_environment_arguments(argv)))
    options.args = dict(options.args)
    return options


def _list() -> None:
    from headway.envs.bundled import ABOUT
    from headway.envs.registry import known_environments

    for name, path in known_environments().items():
        print(f"{name:<16} {ABOUT.get(name, path)}")
    print("\n`headway env show NAME` says more; `headway env try NAME` plays one.")


def _show(name: str, options: Namespace) -> None:
    from headway.envs.base import MultiTurn, ToolUse
    from headway.envs.registry import find_factory, load_environment

    factory = find_factory(name)
    print(f"{name}\n\n{_description(factory)}\n\narguments:")
    parameters = inspect.signature(factory).parameters.values()
    for parameter in parameters:
        default = "(required)" if parameter.default is parameter.empty else f"= {parameter.default!r}"
        print(f"  {parameter.name} {default}")
    if not parameters:
        print("  none")
    if any(p.default is p.empty and p.name not in options.args for p in parameters):
        print("\nGive the required ones with --args.NAME VALUE to see rewards and tasks.")
        return
    environment = load_environment(name, options.args)
    tasks = environment.tasks()
    print("\nrewards:")
    for item in environment.rewards():
        within = f", from {item.within[0]:g} to {item.within[1]:g}" if item.within else ""
        print(f"  {item.name} " + (f"(weight {item.weight:g}{within})" if item.weight else "(a metric)"))
    if not environment.rewards():
        print("  given while an episode runs")
    if isinstance(environment, ToolUse):
        print("\ntools:\n" + "\n".join(f"  {tool.name}: {tool.description}" for tool in environment.toolbox.tools))
    print(f"\ntasks: {len(tasks)}")
    for task in tasks[: options.tasks]:
        print(f"\n  {task.id}  {json.dumps(task.data, ensure_ascii=False)[:300]}")
        if isinstance(environment, MultiTurn):
            _show_prompt(environment.prompt(task))


def _description(factory: object) -> str:
    """Return the docstring of an environment, or its module's; never that of a base class, which says nothing of it."""
    own = factory.__doc__ or getattr(inspect.getmodule(factory), "__doc__", None)
    return inspect.cleandoc(own) if own else "No description."


def _show_prompt(prompt: "Messages") -> None:
    from headway.core.messages import as_messages

    for message in as_messages(prompt):
        text = message.content if len(message.content) <= 600 else message.content[:600] + " …"
        print("    " + f"{message.role}: {text}".replace("\n", "\n    "))


async def _try(name: str, options: Namespace) -> int:
    from headway.envs.registry import load_environment
    from headway.envs.tasks import check_tasks
    from headway.envs.transcript import painted, plain

    paint = painted if sys.stdout.isatty() else plain
    environment = load_environment(name, options.args)
    tasks = environment.tasks()
    check_tasks(name, tasks)
    if not 0 <= options.task < len(tasks):
        raise UsageError(f"--task must be from 0 to {len(tasks) - 1} (got {options.task})")
    await environment.open()
    try:
        task = tasks[options.task]
        play = _watch(name, environment, task, options, paint) if options.url else _by_hand(environment, task, paint)
        return await play
    finally:
        await environment.close()


async def _by_hand(environment: "Environment", task: "Task", paint: "Paint") -> int:
    from headway.envs.hand import HandPolicy
    from headway.envs.policy import EpisodeFailure
    from headway.envs.rewards import score
    from headway.envs.terminal_images import terminal_images
    from headway.envs.transcript import reward_text

    policy = HandPolicy(sys.stdin, print, paint, show_image=terminal_images({}))
    try:
        state = await environment.run(task, policy)
        traces = [agent.trace for agent in policy.agents()]
        await score(environment.rewards(), task, traces, state)
    except EpisodeFailure as failure:
        raise HeadwayError(f"the episode ended early: {failure.message}") from failure
    for trace in traces:
        print(paint("reward", reward_text(trace)))
    return 0


async def _watch(name: str, environment: "Environment", task: "Task", options: Namespace, paint: "Paint") -> int:
    from headway.core.episodes import EpisodeRequest
    from headway.core.protocol import SamplingParams
    from headway.envs.engines.engines import Engines
    from headway.envs.episodes import EpisodeRunner
    from headway.envs.terminal_images import terminal_images
    from headway.envs.transcript import transcript
    from headway.models.registry import load_family
    from headway.models.tiny import resolve_model
    from headway.rendering.load import load_renderer
    from headway.rendering.served import model_of_servers
    from headway.transport.control.tokens import find_token

    assert options.url is not None
    if options.family is not None:
        load_family(options.family)
    given = resolve_model(options.model, weights=False) if options.model else None
    folder = await model_of_servers([options.url], given, find_token())
    renderer, engines = load_renderer(folder), Engines(find_token())
    sampling = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    try:
        runner = EpisodeRunner(environment, name, renderer, engines)
        episode = await runner.run(EpisodeRequest("try", "try", task, [options.url], sampling=sampling))
    finally:
        await engines.close()
    print(transcript(episode, paint, renderer if options.tokens else None, terminal_images(episode.images)))
    return 1 if episode.error is not None else 0


def _demos(name: str, options: Namespace) -> None:
    from headway.envs.registry import find_factory

    module = inspect.getmodule(find_factory(name))
    make = getattr(module, "demonstrations", None)
    if make is None:
        raise UsageError(f"{name} brings no demonstrations")
    try:
        rows = list(make(options.n, options.seed, **options.args))
    except TypeError as error:
        raise UsageError(f"{name}: {error}") from error
    if any("tools" not in row for row in rows) and (tools := _offered_tools(name, options.args)):
        rows = [{**row, "tools": row.get("tools", tools)} for row in rows]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if options.output is None:
        sys.stdout.write(text)
        return
    from headway.base.files import write_atomic

    write_atomic(options.output, text)
    print(f"{len(rows)} conversations in {options.output}")


def _offered_tools(name: str, args: dict[str, object]) -> list[dict[str, object]]:
    """List the tools of an environment as it offers them: a model that is warmed up without them learns another prompt.

    Only arguments that the environment takes are given to it; others are those of its demonstrations.
    """
    from headway.envs.base import ToolUse
    from headway.envs.registry import find_factory, load_environment

    factory = find_factory(name)
    if not (isinstance(factory, type) and issubclass(factory, ToolUse)):
        return []
    taken = {key: value for key, value in args.items() if key in inspect.signature(factory).parameters}
    environment = load_environment(name, taken)
    assert isinstance(environment, ToolUse)
    return [tool.to_openai() for tool in environment.toolbox.tools]
