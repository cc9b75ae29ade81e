"""Choose an engine for a request, by what engines report of themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

Role = Literal["both", "prefill", "decode"]
"""The part of a request that an engine is for: its prompt, the reply after the first token, or both."""

PREFILL_SHARE = 1 / 16
"""The time of a token that is prefilled, as a share of one that is sampled when nothing else runs."""
MOVE_GAIN = 0.9
"""Leave a cached prefix for an engine that takes less than this share of the time: estimates are rough, caches sure."""
SHORT_PREFILL = 512
"""Tokens that an engine prefills between its decoding steps without holding them up much."""
TYPICAL_REPLY = 256
"""Tokens of a reply whose length nobody knows."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine, as it looks for one request.

    `running` and `waiting` are what it reported, `sent` what was sent to it since. `rate` is the tokens per second of
    one sequence there, when some were last seen to run; 0 for never. `cached` tokens of the prompt are in its cache, as
    far as is known. `role` is the part of a request that it is for.
    """

    url: str
    running: int = 0
    waiting: int = 0
    sent: int = 0
    rate: float = 0.0
    cached: int = 0
    role: Role = "both"


def rank_by_role(
    engines: Sequence[EngineView], prompt: int, draw: Random, *, begun: bool, reply: int = TYPICAL_REPLY
) -> list[EngineView]:
    """Order engines for a prompt, or for a reply that has `begun` at another engine, best first.

    Prompts go to engines that prefill, and replies go on at those that decode. The next turn of a conversation goes
    straight to a decoding engine that has nearly all of it in its cache: what is left disturbs others there less than
    moving everything. Engines with another role come last, since any engine can do either.
    """

    def fits(engine: EngineView) -> bool:
        if engine.role == "decode":
            return begun or (engine.cached > 0 and prompt - engine.cached <= SHORT_PREFILL)
        return engine.role == "both" or not begun

    fitting = [engine for engine in engines if fits(engine)]
    others = [engine for engine in engines if not fits(engine)]
    return [engine for group in (fitting, others) if group for engine in rank_engines(group, prompt, draw, reply)]


def rank_engines(
    engines: Sequence[EngineView], prompt: int, draw: Random, reply: int = TYPICAL_REPLY
) -> list[EngineView]:
    """Order engines for a request of `prompt` tokens, best first.

    The engine with the longest cached prefix (that of the conversation's last turn, most often) is compared with two
    others drawn at random, and keeps the request unless one of them should be done clearly earlier: a session stays
    where its cache is as long as prefilling it elsewhere costs more than the shorter line there saves. Without any
    cached prefix this is the power of two choices (Mitzenmacher 2001), which spreads load nearly as well as knowing all
    lines, and, unlike going to the shortest one, does not send everybody to one engine when reports are old. The rest
    follow as fallbacks.
    """
    # An engine that never ran anything is taken to be as fast as the best: it gets a request, and then there is a rate.
    fastest = max((engine.rate for engine in engines), default=0.0) or 1.0

    def seconds(engine: EngineView) -> float:
        return _turn_seconds(engine, engine.rate or fastest, prompt, reply)

    holder = max(engines, key=lambda engine: engine.cached)
    others = [engine for engine in engines if engine is not holder or not holder.cached]
    chosen = min(draw.sample(others, min(2, len(others))), key=seconds, default=holder)
    if holder.cached and MOVE_GAIN * seconds(holder) <= seconds(chosen):
        chosen = holder
    return [chosen, *sorted((engine for engine in engines if engine is not chosen), key=seconds)]


def _turn_seconds(engine: EngineView, rate: float, prompt: int, reply: int) -> float:
    """Estimate how long the engine takes: the line before the request, its prompt as far as not cached, the reply."""
    line = engine.waiting * reply / (rate * max(1, engine.running))
    crowd = (engine.running + engine.sent + 1) / (engine.running + 1)
    return line + (prompt - engine.cached) * PREFILL_SHARE / rate + reply * crowd / rate
