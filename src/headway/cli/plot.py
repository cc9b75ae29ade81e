"""`headway plot`: a picture of one run or several."""

from pathlib import Path

from headway.cli.options import OptionParser

HELP = """\
usage: headway plot RUN [RUN ...] [-o FILE.png]

Draws reward, evaluations and staleness over steps. Default file: reward.png in the first run's folder.
"""


def run(argv: list[str]) -> int:
    from headway.monitor.plot import plot_runs
    from headway.monitor.runs import open_run

    parser = OptionParser("plot")
    parser.add_argument("runs", type=Path, metavar="RUN", nargs="+")
    parser.add_argument("-o", dest="out", type=Path)
    options = parser.parse_args(argv)
    runs = [open_run(folder) for folder in options.runs]
    out = options.out or runs[0].root / "reward.png"
    plot_runs(runs, out)
    print(out)
    return 0
