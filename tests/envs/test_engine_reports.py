"""Workers route calls by what engines report."""

import asyncio

from headway.core.prefixes import PrefixSummary, chain_hash, root_hash
from headway.core.protocol import EngineState
from headway.envs.engines.engines import Engines
from headway.envs.engines.reports import EngineReport

ROOT = root_hash("weights")
TOKENS = list(range(400))


def state(running: int, rate: float, cached: int = 0) -> EngineState:
    names, parent = [], ROOT
    for start in range(0, cached, 4):
        parent = chain_hash(parent, TOKENS[start : start + 4])
        names.append(parent)
    found = EngineState(0, "", running, 0, 0.0, 1 << 20, 0, rate, 4096)
    found.prefixes = PrefixSummary.of(names, 4, {"policy": ROOT})
    return found


def rank(*reports: EngineState | None) -> list[str]:
    async def main() -> list[str]:
        engines, urls = Engines(), [f"http://127.0.0.1:{9 - i}" for i in range(len(reports))]
        for url, reported in zip(urls, reports, strict=True):
            engines._reports[url] = report = EngineReport()
            report._asked_at = float("inf")
            if reported is not None:
                report.take(reported)
        found = engines.rank(urls, TOKENS, "policy")
        await engines.close()
        return [str(urls.index(url)) for url in found]

    return asyncio.run(main())


def test_the_engine_with_the_prefix_comes_first() -> None:
    assert rank(state(4, 100.0), state(4, 100.0, cached=396), state(4, 100.0))[0] == "1"


def test_slow_engines_and_those_that_do_not_answer_come_last() -> None:
    assert rank(state(4, 4.0), state(4, 400.0)) == ["1", "0"]
    assert rank(None, state(4, 4.0)) == ["1", "0"]


def test_without_any_report_the_order_of_the_request_stays() -> None:
    assert rank(None, None, None) == ["0", "1", "2"]


def test_the_rate_of_one_sequence_is_remembered_while_an_engine_is_idle() -> None:
    report = EngineReport()
    report.take(state(4, 100.0))
    report.sent += 3
    report.take(state(0, 0.0))
    view = report.view("url", TOKENS, "policy")
    assert (view.rate, view.sent, view.running) == (25.0, 0, 0)
