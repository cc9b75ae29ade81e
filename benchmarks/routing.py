"""Prefix reuse and turn times of two routing rules over four engines of unequal speed, under virtual time.

    python benchmarks/routing.py --save benchmarks/results/routing.json

Conversations of many turns run at once; between two turns a tool takes its time. One engine restarts midway: it is away
for some seconds and has lost its cache. "Affinity" keeps an episode at the engine that had the fewest episodes when it
began, and goes to the next one while that is away: the rule before engines reported anything. "Reported" is
`headway.core.routing.rank_engines` over reports that are up to a second old. The oracle reuses every token that was
computed before. Bars: reuse of at least 0.9 of the oracle's, p99 of turn times at most 0.7 of the affinity rule's.
"""

import argparse
import json
from collections import deque
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

from headway.core.routing import EngineView, rank_engines

CONVERSATIONS, TURNS = 96, 10
ASKED, SAID = 200, 100
"""Tokens that a turn adds to the prompt, and tokens of a reply (half as many to half more)."""
SPEEDS = (400.0, 400.0, 200.0, 100.0)
"""Tokens per second of an engine with at least `FULL` sequences; with fewer, their share of that."""
FULL, MAX_RUNNING = 8, 32
PREFILL = 16.0
"""Tokens prefilled in the time of one that is sampled at full speed."""
TOOL_SECONDS = 4.0
RESTART, AWAY = 60.0, 10.0
REPORT_EVERY, STEP = 1.0, 0.05
FIRST_SEED = 100
REUSE_BAR, TIME_BAR = 0.9, 0.7


@dataclass(eq=False)
class Conversation:
    number: int
    turn: int = 0
    tokens: int = 0
    due: float = 0.0
    began: float = 0.0
    left: float = 0.0
    """Work of the turn that is left, in tokens sampled; `said` of them are still to be sampled, of `reply` in all."""
    said: int = 0
    reply: int = 0
    home: int = -1


@dataclass(eq=False)
class Engine:
    speed: float
    cached: dict[int, int] = field(default_factory=dict)
    running: list[Conversation] = field(default_factory=list)
    waiting: deque[Conversation] = field(default_factory=deque)
    away_until: float = 0.0
    reported: tuple[int, int, dict[int, int]] = (0, 0, {})
    rate: float = 0.0
    sent: int = 0

    def per_sequence(self) -> float:
        return self.speed / max(FULL, len(self.running))

    def report(self) -> None:
        self.reported, self.sent = (len(self.running), len(self.waiting), dict(self.cached)), 0
        if self.running:
            self.rate = self.per_sequence()


class Simulation:
    """One run of all conversations under a rule: "affinity" or "reported"."""

    def __init__(self, rule: str, seed: int = 0) -> None:
        self.rule, self.draw = rule, Random(seed)
        self.engines = [Engine(speed) for speed in SPEEDS]
        self.talks = [Conversation(i, due=self.draw.uniform(0, TOOL_SECONDS)) for i in range(CONVERSATIONS)]
        self.thinking = set(self.talks)
        self.reused = self.reusable = 0
        self.turn_seconds: list[float] = []
        self.now = 0.0

    def run(self) -> dict[str, Any]:
        restarted, next_report = False, 0.0
        while self.thinking or any(e.running or e.waiting for e in self.engines):
            if not restarted and self.now >= RESTART:
                restarted = True
                self.restart(self.engines[0])
            if self.now >= next_report:
                next_report += REPORT_EVERY
                for engine in self.engines:
                    engine.report()
            for talk in sorted((t for t in self.thinking if t.due <= self.now), key=lambda t: t.number):
                self.ask(talk)
            for engine in self.engines:
                self.advance(engine)
            self.now += STEP
        times = sorted(self.turn_seconds)
        return {
            "reuse_of_oracle": self.reused / self.reusable,
            "p50_seconds": times[len(times) // 2],
            "p99_seconds": times[int(0.99 * len(times))],
            "seconds": self.now,
        }

    def ask(self, talk: Conversation) -> None:
        up = [e for e in self.engines if e.away_until <= self.now]
        engine = self.affinity(talk, up) if self.rule == "affinity" else self.best(talk, up)
        self.thinking.discard(talk)
        if not talk.left:
            talk.began, talk.said = self.now, round(SAID * self.draw.uniform(0.5, 1.5))
            talk.reply = talk.said
            self.reusable += talk.tokens
        cached = engine.cached.get(talk.number, 0)
        self.reused += cached
        talk.left = (talk.tokens + ASKED - cached) / PREFILL + talk.said
        engine.waiting.append(talk)
        engine.sent += 1

    def affinity(self, talk: Conversation, up: list[Engine]) -> Engine:
        if talk.home < 0:
            homes = [t.home for t in self.talks if t.turn < TURNS]
            talk.home = min(range(len(self.engines)), key=homes.count)
        order = self.engines[talk.home :] + self.engines[: talk.home]
        return next(engine for engine in order if engine in up)

    def best(self, talk: Conversation, up: list[Engine]) -> Engine:
        views = [
            EngineView(
                str(self.engines.index(e)),
                e.reported[0],
                e.reported[1],
                e.sent,
                e.rate,
                e.reported[2].get(talk.number, 0),
            )
            for e in up
        ]
        return self.engines[int(rank_engines(views, talk.tokens + ASKED, self.draw, SAID)[0].url)]

    def advance(self, engine: Engine) -> None:
        if engine.away_until > self.now:
            return
        while engine.waiting and len(engine.running) < MAX_RUNNING:
            engine.running.append(engine.waiting.popleft())
        work = engine.per_sequence() * STEP
        for talk in list(engine.running):
            talk.left -= work
            if talk.left <= 0:
                self.finish(engine, talk)

    def finish(self, engine: Engine, talk: Conversation) -> None:
        engine.running.remove(talk)
        talk.left, talk.turn = 0.0, talk.turn + 1
        talk.tokens += ASKED + talk.reply
        engine.cached[talk.number] = talk.tokens
        self.turn_seconds.append(self.now - talk.began)
        if talk.turn < TURNS:
            talk.due = self.now + self.draw.expovariate(1 / TOOL_SECONDS)
            self.thinking.add(talk)

    def restart(self, engine: Engine) -> None:
        """Its requests go on elsewhere after the tokens they have, its cache is gone."""
        for talk in [*engine.running, *engine.waiting]:
            talk.due, talk.said = self.now, min(talk.said, ceil(talk.left))
            self.thinking.add(talk)
        engine.running, engine.waiting, engine.cached = [], deque(), {}
        engine.away_until = self.now + AWAY
        engine.report()


def compare(seeds: int = 10) -> dict[str, Any]:
    """Both rules, averaged over seeds that the policy was not tuned on, with the ratios that the bars are about."""
    report: dict[str, Any] = {}
    for rule in ("affinity", "reported"):
        runs = [Simulation(rule, seed).run() for seed in range(FIRST_SEED, FIRST_SEED + seeds)]
        report[rule] = {name: sum(run[name] for run in runs) / seeds for name in runs[0]}
    report["p99_of_affinity"] = report["reported"]["p99_seconds"] / report["affinity"]["p99_seconds"]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    report = compare()
    print(json.dumps(report, indent=2))
    if arguments.save:
        arguments.save.write_text(json.dumps(report, indent=2) + "\n")
    if report["reported"]["reuse_of_oracle"] < REUSE_BAR or report["p99_of_affinity"] > TIME_BAR:
        raise SystemExit("a bar is missed")


if __name__ == "__main__":
    main()
