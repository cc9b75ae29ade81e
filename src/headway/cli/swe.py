"""`headway swe`: make tasks of software engineering from packages, and look at them."""

import asyncio
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from headway.base.errors import HeadwayError, UsageError
from headway.cli.options import OptionParser

HELP = """\
usage: headway swe make [-o FOLDER] [--packages default] [--per-package 20] [options]
       headway swe show FOLDER [--task ID] [--solution]

make    plant bugs in packages where their tests look, and keep those that break some tests and leave most
show    list the tasks of a folder, or one task's issue (and, with --solution, the patch that resolves it)

  -o FOLDER           where tasks, archives, roots and the report go (tasks); call it again to resume
  --packages LIST     `default`, a TOML list, or names, name==version, folders and archives: a,b==1.2,./mine
  --per-package N     tasks per package (20)
  --seed N            which bugs are chosen (0)
  --kinds LIST        kinds of bugs, with commas: operator, boundary, argument, branch, statement, constant, several
  --jobs N            sandboxes at once (one per core)
  --minutes M         begin nothing new after this time
  --sandbox KIND      the kind of sandbox (auto)

Packages come from the index that pip uses. What they need is installed as wheels, which run nothing; their own code
runs in sandboxes only.

Examples:
  headway swe make -o tasks
  headway swe make -o tasks --packages inflection,./my-package --per-package 5
  headway swe show tasks --task inflection-0.5.1.boundary.1a2b3c4d --solution
  headway env try swe --args.tasks tasks
"""


def run(argv: list[str]) -> int:
    match argv:
        case ["make", *rest]:
            return _make(_parse_make(rest))
        case ["show", *rest]:
            return _show(_parse_show(rest))
        case _:
            raise UsageError("`headway swe` takes make or show; see `headway swe --help`")


def _parse_make(argv: Sequence[str]) -> Namespace:
    chosen = {"packages": "default", "per_package": 20, "seed": 0, "kinds": ""}
    parser = OptionParser("swe", **chosen, jobs=os.cpu_count() or 1, minutes=float, sandbox="auto")
    parser.add_argument("-o", dest="folder", type=Path, default=Path("tasks"))
    options = parser.parse_args(list(argv))
    for name in ("per_package", "jobs"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1 (got {getattr(options, name)})")
    return options


def _parse_show(argv: Sequence[str]) -> Namespace:
    parser = OptionParser("swe", task=str, solution=False)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    return parser.parse_args(list(argv))


def _make(options: Namespace) -> int:
    from headway.envs.swe.make.maker import Maker, MakeSettings
    from headway.envs.swe.make.mutations import KINDS, SEVERAL, check_kinds
    from headway.envs.swe.make.packages import read_packages
    from headway.envs.swe.make.report import REPORT

    kinds = tuple(options.kinds.split(",")) if options.kinds else (*KINDS, SEVERAL)
    check_kinds(kinds)
    packages = read_packages(options.packages)
    settings = MakeSettings(
        packages,
        options.folder,
        options.per_package,
        options.seed,
        kinds,
        options.jobs,
        options.sandbox,
        options.minutes,
    )
    reports = asyncio.run(Maker(settings, lambda line: print(line, file=sys.stderr, flush=True)).make())
    print((options.folder / REPORT).read_text(), end="")
    if not any(report.tasks for report in reports):
        raise HeadwayError(f"no task could be made; {options.folder / REPORT} says why")
    return 0


def _show(options: Namespace) -> int:
    from headway.envs.swe.tasks import TaskFolder

    tasks = TaskFolder(options.folder).tasks()
    if options.task is None:
        for task in tasks:
            print(f"{task.id:<56} {len(task.fail_to_pass):>4} tests   {task.issue.splitlines()[0].lstrip('# ')[:100]}")
        return 0
    chosen = next((task for task in tasks if task.id == options.task), None)
    if chosen is None:
        raise UsageError(
            f"{options.folder} has no task {options.task!r}; `headway swe show {options.folder}` lists them"
        )
    print(chosen.issue, end="")
    if options.solution:
        print(f"\n{chosen.patch}", end="")
    return 0
