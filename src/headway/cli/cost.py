"""`headway cost`: the energy and money of runs, and who waited for whom."""

from pathlib import Path

from headway.cli.options import OptionParser

HELP = """\
usage: headway cost RUN [RUN ...] [--json]

Shows what runs have cost so far: energy and money in all, per step, per million tokens sampled and trained, and per
solved task; and where the time of trainer and engines went, with a line for each that waited for the other. Energy is
measured where the machine has counters (NVML, RAPL), and else an estimate that is called one. Prices are settings of
the run, [cost]; without them there is energy and time, and no money. What each line counts: docs/cost.md.

  --json    print one JSON object per run

Examples:
  headway cost outputs/my-run
  headway rl @ rl.toml --cost.gpu_hour 2.5
"""


def run(argv: list[str]) -> int:
    import msgspec

    from headway.monitor.cost.ledger import ledger_lines, read_ledger
    from headway.monitor.runs import open_run

    parser = OptionParser("cost", json=False)
    parser.add_argument("runs", type=Path, metavar="RUN", nargs="+")
    options = parser.parse_args(argv)
    for number, paths in enumerate([open_run(folder) for folder in options.runs]):
        ledger = read_ledger(paths)
        if options.json:
            print(msgspec.json.encode(ledger).decode())
            continue
        print("\n" * bool(number) + "\n".join(ledger_lines(ledger)))
    return 0
