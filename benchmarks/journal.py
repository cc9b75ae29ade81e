"""What a run's journal costs: bytes beside its rollouts, and time beside its steps.

    python benchmarks/journal.py outputs/my-run
    python benchmarks/journal.py outputs/short outputs/long --save benchmarks/results/journal.json

Writes all events of a run's journal once more, with the clock and the checks of a run, and computes the digests of the
batches it still has; both are what the journal adds to a step.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from headway.core.batches import Batch
from headway.core.journal import Formed, Input, JournalFile, Seen, Sent, read_journal
from headway.core.runs import RunPaths
from headway.monitor.metrics import read_metrics
from headway.orchestrator.journaling import Journal
from headway.transport.rollouts import RankBatch


def measure(paths: RunPaths) -> dict[str, Any]:
    journal = read_journal(paths.journal)
    steps = [line for line in read_metrics(paths.metrics / "orchestrator.jsonl") if "batch/episodes" in line]
    rollouts = sum(file.stat().st_size for file in paths.rollouts.iterdir())
    trained = sum(line["batch/episodes"] for line in steps)
    step_seconds = sum(line["step_seconds"] for line in steps) / len(steps)
    seconds = write_seconds(journal.events) / len(steps) + digest_seconds(paths)
    return {
        "run": paths.root.name,
        "steps": len(steps),
        "events": len(journal.events),
        "tokens_per_episode": sum(line["batch/tokens"] for line in steps) / trained,
        "journal_bytes_per_step": journal.size / len(steps),
        "rollouts_bytes_per_step": rollouts / len(steps),
        "bytes_ratio": journal.size / rollouts,
        "journal_ms_per_step": 1000 * seconds,
        "step_ms": 1000 * step_seconds,
        "time_ratio": seconds / step_seconds,
    }


def write_seconds(events: Any) -> float:
    """Write the events as a run does: a frame for each batch."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(JournalFile(Path(folder) / "journal.bin", 1 << 30))
        journal.watch(lambda: 0, Quiet())  # type: ignore[arg-type]  # looks like an updater
        began = time.perf_counter()
        for event in events:
            if isinstance(event, Input):
                journal.input(event)
            elif not isinstance(event, Seen | Sent):
                journal.decided(event)
            if isinstance(event, Formed):
                journal.flush()
        journal.close()
        return time.perf_counter() - began


class Quiet:
    """An updater without news."""

    newest_version, busy, fingerprint = 0, False, ""


def digest_seconds(paths: RunPaths) -> float:
    """Mean over the batches that are still on disk."""
    spent = []
    for step in paths.spooled_batches():
        parts = [RankBatch.decode(file.read_bytes(), "") for file in paths.batch(step).glob("rank_*.msgpack")]
        batch = Batch(step, [part.micro_batches for part in parts], parts[0].counts)
        began = time.perf_counter()
        batch.digest()
        spent.append(time.perf_counter() - began)
    return sum(spent) / len(spent) if spent else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--save", type=Path, help="write the results here, as JSON")
    options = parser.parse_args()
    results = [measure(RunPaths(run)) for run in options.runs]
    for result in results:
        print(
            f"{result['run']}: {result['tokens_per_episode']:.0f} tokens an episode; journal "
            f"{result['bytes_ratio']:.2%} of the rollouts' bytes, {result['time_ratio']:.3%} of a step's time"
        )
    if options.save:
        options.save.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
