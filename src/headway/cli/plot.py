"""`headway plot`: a picture of one run or several."""

from pathlib import Path

from headway.core.errors import UsageError

HELP = """\
usage: headway plot RUN [RUN ...] [-o FILE.png]

Draws reward, evaluations and staleness over steps. Default file: reward.png in the first run's folder.
"""


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    from headway.monitor.plot import plot_runs
    from headway.monitor.runs import open_run

    out: Path | None = None
    if "-o" in argv:
        at = argv.index("-o")
        if at + 1 == len(argv):
            raise UsageError("-o needs a file name")
        out = Path(argv[at + 1])
        argv = argv[:at] + argv[at + 2 :]
    if not argv:
        raise UsageError("name at least one run folder")
    runs = [open_run(Path(folder)) for folder in argv]
    out = out or runs[0].root / "reward.png"
    plot_runs(runs, out)
    print(out)
    return 0
