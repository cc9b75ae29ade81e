"""Benchmarks of a swarm, each with options of its own (`--help`):

    python benchmarks/swarm.py checks     honest contributions and lies of every kind, judged by every check
    python benchmarks/swarm.py simulate   1,000 workers under virtual time: churn, liars, throughput
    python benchmarks/swarm.py flood      bad uploads and forged keys against the service, beside honest workers
    python benchmarks/swarm.py run        a real run with twelve workers in network namespaces, eight kinds of liars

Each prints one JSON object, writes it to results/, and exits with 1 where one of its bars does not hold.
"""

import sys
from importlib import import_module
from pathlib import Path

PARTS = {
    "checks": "swarm_checks",
    "simulate": "swarm_simulate",
    "flood": "swarm_flood",
    "run": "swarm_real_run",
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in PARTS:
        sys.exit(__doc__)
    sys.path.insert(0, str(Path(__file__).parent / "swarm_parts"))
    import_module(PARTS[sys.argv[1]]).main(sys.argv[2:])
