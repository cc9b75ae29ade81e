"""How long the command line takes to answer, from a fresh process: `python benchmarks/cli.py [--runs N]`.

Bars, on two cores: `headway --help` under 0.5 s, `headway doctor` under 3 s. Exits with 1 when one does not hold.
"""

import argparse
import statistics
import subprocess
import sys
import time

BARS = {"--help": 0.5, "doctor": 3.0, "config show rl": None, "rl --help": None}


def seconds(arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "headway.cli.main", *arguments.split()], stdout=subprocess.DEVNULL, check=True
    )
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="processes per command (9)")
    runs = parser.parse_args().runs
    held = True
    print(f"{'command':<24} {'median':>8} {'worst':>8} {'bar':>8}")
    for arguments, bar in BARS.items():
        times = [seconds(arguments) for _ in range(runs)]
        median, worst = statistics.median(times), max(times)
        held &= bar is None or median < bar
        print(f"headway {arguments:<16} {median:>6.3f} s {worst:>6.3f} s {f'{bar} s' if bar else '':>8}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
