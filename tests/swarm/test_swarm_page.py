"""The data of the dashboard's page of a swarm: read on while the ledger grows."""

from collections import Counter
from pathlib import Path

from headway.core.runs import RunPaths
from headway.swarm.messages.keys import SigningKey
from headway.swarm.messages.verdict import Verdict
from headway.swarm.trust.events import Judged, Opened, Ordered
from headway.swarm.trust.ledger import Ledger
from headway.swarm.work.page import SwarmPage
from headway.swarm.work.traffic import TrafficFile

KEY = SigningKey(b"r" * 32)


def test_the_page_follows_a_ledger_that_grows(tmp_path: Path) -> None:
    paths, page = RunPaths(tmp_path), SwarmPage()
    assert "No strangers" in page.of(paths)["problem"]
    now = iter(range(100))
    path = paths.swarm / "ledger.jsonl"
    ledger = Ledger(path, KEY, clock=lambda: float(next(now)))
    ledger.append(Opened("a-run", KEY.public.hex(), "c"))
    for number, verdict in enumerate((Verdict(True, tokens=30), Verdict(False, "draws", "other tokens"))):
        ledger.append(Ordered("aa", f"{number}", 1, "weights", number))
        ledger.append(Judged("aa", f"{number}", "hash", verdict))
        shown = page.of(paths)
        assert (shown["accepted"], shown["refused"]) == (1, number)
    (worker,) = shown["workers"]
    assert worker["tokens"] == 30 and worker["per_second"] == 10.0 and worker["strikes"] == 1
    assert shown["refused_by"] == {"draws": 1} and shown["reasons"][0]["reason"] == "other tokens"
    # A line that is being written is left for later.
    with path.open("ab") as file:
        file.write(b'{"number":5,')
    TrafficFile(paths.swarm / "traffic.json").write(1000, Counter({"aa": 50}))
    shown = page.of(paths)
    assert shown["refused"] == 1 and shown["weights_bytes"] == 1000 and shown["workers"][0]["uploaded"] == 50
    ledger.close()
