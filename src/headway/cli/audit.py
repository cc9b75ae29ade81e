"""`headway audit`: signs that a run's reward is had without doing the task."""

from pathlib import Path

from headway.cli.options import OptionParser

HELP = """\
usage: headway audit RUN [RUN ...] [--json] [--strict]

Looks through the recorded rollouts of a run, also while it goes on, for signs of reward hacking and collapse: one
pattern or template that earns the reward, replies that speak to the grader, answers that stand in prompts, calls that
change tests, copies of the prompt, repetition, length; a reward that rises while held-out tasks or a second scorer
fall; replies that are all the same. Each finding comes with its figures and with rollouts that show it.

  --json     print the findings as JSON, one line per run
  --strict   exit with 1 where there is a problem or a warning

problem: an exploit at work. warning: look at it. notice: good to know. What each cause means, and how to give a run a
second scorer (@reward(audit=True)): docs/audit.md.

Examples:
  headway audit outputs/my-run
  headway audit outputs/my-run --strict && headway export outputs/my-run
"""


def run(argv: list[str]) -> int:
    import msgspec

    from headway.monitor.audit.report import audit_run, report_lines
    from headway.monitor.runs import open_run

    parser = OptionParser("audit", json=False, strict=False)
    parser.add_argument("runs", type=Path, metavar="RUN", nargs="+")
    options = parser.parse_args(argv)
    grave = False
    for number, paths in enumerate([open_run(folder) for folder in options.runs]):
        audit = audit_run(paths)
        grave = grave or audit.worst in ("problem", "warning")
        if options.json:
            print(msgspec.json.encode({"run": paths.root.name, "audit": audit}).decode())
            continue
        print("\n" * bool(number) + "\n".join(report_lines(paths, audit)))
    return int(options.strict and grave)
