"""Rules of context management as functions: messages in, messages out. Pure, except that counting is passed in."""

from collections.abc import Callable, Sequence

import msgspec

from headway.core.messages import Message

LEFT_OUT = "[output left out]"
ASK_SUMMARY = (
    "The conversation is about to be shortened. Write down what is needed to go on without it: what was asked, what "
    "was done and found, what comes next. Call no tool."
)
SUMMARY = "Earlier turns were left out. Your summary of them:\n"

Count = Callable[[list[Message]], int]
"""Counts the tokens of the prompt that a conversation becomes."""


def split_turns(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Split into what comes before the first reply, and turns: a reply and what followed it, each."""
    opening: list[Message] = []
    turns: list[list[Message]] = []
    for message in messages:
        if message.role == "assistant":
            turns.append([message])
        else:
            (turns[-1] if turns else opening).append(message)
    return opening, turns


def keep_last(messages: Sequence[Message], outputs: int) -> list[Message]:
    """Replace all tool outputs but the last ones, unless they are shorter than what would replace them."""
    places = [i for i, message in enumerate(messages) if message.role == "tool"]
    old = set(places[: max(0, len(places) - outputs)])
    return [
        msgspec.structs.replace(message, content=LEFT_OUT)
        if i in old and len(message.content) > len(LEFT_OUT)
        else message
        for i, message in enumerate(messages)
    ]


def drop_old(messages: Sequence[Message], keep: int) -> list[Message]:
    """Drop all turns but the last ones."""
    opening, turns = split_turns(messages)
    return _join(opening, turns[max(0, len(turns) - keep) :])


def fit_budget(messages: Sequence[Message], tokens: int, count: Count) -> list[Message]:
    """Drop the fewest of the oldest turns with which the rest has at most `tokens`; the last turn always stays."""
    opening, turns = split_turns(messages)
    fewest, most = 0, max(0, len(turns) - 1)
    while fewest < most:
        middle = (fewest + most) // 2
        if count(_join(opening, turns[middle:])) <= tokens:
            most = middle
        else:
            fewest = middle + 1
    return _join(opening, turns[fewest:])


def ask_summary(messages: Sequence[Message]) -> list[Message]:
    """The conversation with the request for a summary. It joins a user's last message, as some templates refuse two."""
    *before, last = messages
    if last.role == "user":
        return [*before, msgspec.structs.replace(last, content=f"{last.content}\n\n{ASK_SUMMARY}")]
    return [*messages, Message("user", ASK_SUMMARY)]


def summarized(opening: Sequence[Message], messages: Sequence[Message], keep: int, summary: str) -> list[Message]:
    """`opening` with the summary at its end, and the last turns of `messages`."""
    _, turns = split_turns(messages)
    text = SUMMARY + summary.strip()
    if opening and opening[-1].role == "user":
        told = [*opening[:-1], msgspec.structs.replace(opening[-1], content=f"{opening[-1].content}\n\n{text}")]
    else:
        told = [*opening, Message("user", text)]
    return _join(told, turns[max(0, len(turns) - keep) :])


def _join(opening: Sequence[Message], turns: Sequence[Sequence[Message]]) -> list[Message]:
    return [*opening, *(message for turn in turns for message in turn)]
