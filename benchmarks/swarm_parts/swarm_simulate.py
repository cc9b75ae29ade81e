"""A thousand simulated workers, 5 % of which leave every minute and 30 % of which lie.

    python benchmarks/swarm.py simulate [--workers 1000] [--minutes 10] [--seed 0] [--results FILE]

The run's side is the real one: orders, trust, limits, demand and ledger, under virtual time. Sampling and checks take
virtual seconds; a lie is seen where the real checks see it, with the share of contributions that is rescored.

`honest_ideal` is what honest workers could give: the time that they were there, by the time that an order takes them.
Bars: at least 90 % of that is used, and no more lies are trained than `lies_trained_at_most`. Trust allows some each
time that a key of good name begins to lie about one episode of each order: (1 - chance) / chance on average, and the
bar is three standard deviations above. The chance that such a lie is seen is that of being rescored, at the least
share, or that its episode is the one that is computed again. A lie about all episodes is seen at once.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from swarm_simulation import Scene, simulate

RESULTS = Path(__file__).parents[1] / "results" / "swarm_simulation.json"
LEAST_THROUGHPUT = 0.9
MEMORY = Path("/dev/shm")
"""The ledger waits for the disk at every line, which is not what is measured here."""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    scene = replace(Scene(), workers=options.workers, minutes=options.minutes, seed=options.seed, batch=options.workers)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="headway-swarm-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        found = simulate(scene, Path(folder))
    shown = {"scene": asdict(scene), "seconds": round(time.perf_counter() - began, 1), **found}
    text = json.dumps(shown, indent=1)
    options.results.write_text(text + "\n")
    print(text)
    held = found["throughput"] >= LEAST_THROUGHPUT and found["lies_trained"] <= found["lies_trained_at_most"]  # type: ignore[operator]
    sys.exit(int(not held))
