"""The `headway` command: finds the subcommand, runs it, turns failures into one line and an exit code.

Nothing heavy is imported here: `headway --help` must answer at once.
"""

import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from headway import __version__
from headway.base.errors import CRASHED, MESSAGE_PREFIX, STOPPED, HeadwayError, UsageError
from headway.base.processes import die_with_parent_if_asked

COMMANDS = {
    "Start here": {
        "doctor": "say what this machine can do, and the remedy for what it cannot",
    },
    "Train": {
        "plan": "predict memory, time, cost and bottleneck of a run before it is paid for",
        "rl": "train with reinforcement learning: trainer, orchestrator and inference in one command",
        "sft": "fine-tune on conversations",
        "train": "run the trainer of a run by itself",
        "orchestrate": "run the orchestrator of a run by itself",
        "host": "share one frozen model, its trainer and its engines among many LoRA runs",
    },
    "Serve and evaluate": {
        "serve": "serve a model over HTTP",
        "eval": "evaluate a model on environments",
        "env": "list, try and check environments",
        "swe": "make software-engineering tasks from packages",
        "sandboxes": "run sandboxes on this machine for others",
    },
    "Swarms": {
        "swarm": "let strangers work for a run; make keys and audit the ledger",
        "contribute": "work for a run with this machine",
        "relay": "pass the weights of a swarm on",
    },
    "Look inside": {
        "runs": "list the runs of a folder, each with its state",
        "status": "say where a run stands, from its folder or its address",
        "logs": "show the logs of all processes of a run",
        "stop": "ask a run to stop, with a checkpoint",
        "dash": "open the live dashboard of runs",
        "plot": "draw reward and staleness of runs",
        "rollouts": "read recorded episodes",
        "cost": "show the energy and money of runs, and who waited for whom",
        "audit": "look for signs that a run's reward is had without doing the task",
        "replay": "repeat a run from its journal, explain a step, or train its rollouts with other settings",
        "config": "show resolved settings with their origin, or the reference of all settings",
    },
    "Models": {
        "convert": "turn a checkpoint of another format into a Hugging Face one",
        "export": "write a run's weights as a Hugging Face checkpoint",
    },
}

NEED_NO_ARGUMENTS = ("doctor", "train", "runs", "dash", "sandboxes")
"""Commands that start without any argument; the others print their help."""

DISK_ERRORS = {
    errno.ENOSPC: "the disk is full; free some space and start again",
    errno.EDQUOT: "the disk quota is used up; free some space and start again",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "permission denied; choose another folder or change its permissions",
}


def main() -> None:
    """The console entry point."""
    die_with_parent_if_asked()
    code = run(sys.argv[1:])
    # The outcome stands: a Ctrl-C that comes while the interpreter ends must not turn it into a death by signal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    0 done, 1 failed, 2 wrong usage, 3 failed as another attempt would, 4 its files are damaged, 70 failed unexpectedly,
    130 stopped.
    """
    try:
        code = _dispatch(argv)
        sys.stdout.flush()
        return code
    except HeadwayError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted", STOPPED)
    except BrokenPipeError:
        # The reader of our output is gone (`| head`); keep the interpreter from failing again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _crash(error)


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"headway {__version__}")
        return 0
    name, *rest = argv
    if name not in commands():
        raise UsageError(_unknown_command(name))
    command = importlib.import_module(f"headway.cli.{name}")
    if {"-h", "--help"} & set(rest) or (not rest and name not in NEED_NO_ARGUMENTS):
        print(command.HELP, end="")
        return 0
    return int(command.run(rest))


def commands() -> list[str]:
    return [name for group in COMMANDS.values() for name in group]


def help_text() -> str:
    lines = [
        "Headway: asynchronous reinforcement learning for language-model agents.",
        "",
        "usage: headway COMMAND [@ settings.toml ...] [--setting value ...]",
    ]
    for title, group in COMMANDS.items():
        lines += ["", f"{title}:", *(f"  {name:<12} {text}" for name, text in group.items())]
    lines += [
        "",
        "Settings are TOML files, later ones win, flags win over files:",
        "  headway rl @ base.toml @ mine.toml --trainer.optim.lr 1e-5 --dry-run",
        "",
        "`headway COMMAND --help` says more about a command; `headway config docs` lists every setting.",
    ]
    return "\n".join(lines)


def _unknown_command(name: str) -> str:
    from headway.base.suggestions import did_you_mean, nearest

    return f"no command {name!r}{did_you_mean(nearest(name, commands())) or '.'} See `headway --help`."


def _crash(error: Exception) -> int:
    """Report an unexpected failure: one line for the user, the traceback into the process's log file."""
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(where + DISK_ERRORS[error.errno], 1)
    if os.environ.get("HEADWAY_DEBUG"):
        traceback.print_exception(error)
        return CRASHED
    logs = sys.modules.get("headway.monitor.logs")
    record = logs.record_crash(error) if logs else None
    where = f"the traceback is in {record}" if record else "set HEADWAY_DEBUG=1 to see the traceback"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return _fail(f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno}); {where}", CRASHED)


def _fail(message: str, code: int) -> int:
    for line in message.splitlines() or [""]:
        print(MESSAGE_PREFIX + line.removeprefix(MESSAGE_PREFIX), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
