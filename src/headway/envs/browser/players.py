"""Scripted players, one for each kind of site. They read what a model would read, and solve every task."""

import json
import re
from collections.abc import Callable, Sequence

from headway.core.messages import Message, ToolCall
from headway.envs.browser.sites.vote import PLACES

Move = tuple[str, dict[str, object]] | None
"""A tool and its arguments; None when the task is done."""
DONE = Message("assistant", "done")


class Shown:
    """A page as a tool showed it."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        title = re.search(r'^page "(.*)" at', text, re.MULTILINE)
        self.title = title[1] if title else ""

    def find(self, role: str, name: str, after: int = 0) -> int | None:
        """Return the number of an element whose name begins so."""
        for line in self.lines[after:]:
            if match := re.search(rf'\[(\d+)\] {role} "{re.escape(name)}', line):
                return int(match[1])
        return None

    def holds(self, text: str) -> bool:
        return any(text in line for line in self.lines)


def play_site(site: str, messages: Sequence[Message]) -> Message:
    """Make the next reply of the player for this kind of site."""
    goal = next(message.content for message in messages if message.role == "user")
    pages = [Shown(message.content) for message in messages if message.role in ("user", "tool") and message.content]
    move = _PLAYERS[site](goal, pages)
    if move is None:
        return DONE
    call = ToolCall(f"call_{len(messages)}", move[0], json.dumps(move[1], ensure_ascii=False))
    return Message("assistant", tool_calls=(call,))


def _play_form(goal: str, pages: list[Shown]) -> Move:
    found = re.match(r"Register (.+) from (\w+) with the e-mail address (\S+) for the plan (\w+), (\w+) the", goal)
    assert found is not None
    name, country, email, plan, letters = found.groups()
    page = pages[-1]
    for field, text in (("Name", name), ("E-mail", email)):
        if (number := page.find("textbox", field)) and not page.holds(f'"{field}" (value "{text}")'):
            return "type", {"element": number, "text": text}
    if (number := page.find("combobox", "Country")) and not page.holds(f'"Country" (value "{country}")'):
        return "select", {"element": number, "option": country}
    if (number := page.find("radio", plan)) and not page.holds(f'"{plan}" (checked)'):
        return "click", {"element": number}
    box = page.find("checkbox", "Send me")
    if box and letters == "with" and page.holds("(not checked)") and page.holds('newsletter" (not checked)'):
        return "click", {"element": box}
    button = page.find("button", "Register")
    return ("click", {"element": button}) if button else None


def _play_shop(goal: str, pages: list[Shown]) -> Move:
    wanted = {name: int(count) for count, name in re.findall(r"(\d+) × (\w+ \w+)", goal.splitlines()[0])}
    page = pages[-1]
    basket = next((seen for seen in reversed(pages) if seen.title == "Basket"), None)
    missing = [name for name, count in wanted.items() if basket is None or not basket.holds(f"{count} × {name}")]
    if page.title == "Thank you":
        return None
    if page.title in wanted:
        count = wanted[page.title]
        if not page.holds(f'"Quantity" (value "{count}")'):
            return "type", {"element": page.find("textbox", "Quantity"), "text": str(count)}
        return "click", {"element": page.find("button", "Add to basket")}
    if page.title == "Basket":
        number = page.find("link", "Catalogue") if missing else page.find("button", "Place the order")
        return "click", {"element": number}
    number = next((found for name in missing if (found := page.find("link", name))), None)
    return "click", {"element": number or page.find("link", "Next page")}


def _play_wiki(goal: str, pages: list[Shown]) -> Move:
    found = re.match(r"Start at the article “(.+)” and follow, one after the other: (.+?)\. Put", goal)
    assert found is not None
    river, steps = found[1], found[2].split(", ")
    page, done = pages[-1], len(pages) - 2
    if done < 0:
        return "click", {"element": page.find("link", river)}
    if done < len(steps):
        named = (f'"{steps[done]}"', steps[done])  # as a tree and as text
        line = next(number for number, text in enumerate(page.lines) if text.endswith(named))
        return "click", {"element": page.find("link", "", after=line)}
    button = page.find("button", "Watch this article")
    return ("click", {"element": button}) if button else None


def _play_table(goal: str, pages: list[Shown]) -> Move:
    found = re.match(r"Archive all invoices of the customer (\w+) with the state “(\w+)”", goal)
    assert found is not None
    customer, state = found.groups()
    page = pages[-1]
    if not page.holds(f'"Customer" (value "{customer}")'):
        return "type", {"element": page.find("textbox", "Customer"), "text": customer}
    if not page.holds(f'"State" (value "{state}")'):
        return "select", {"element": page.find("combobox", "State"), "option": state}
    button = page.find("button", "Archive")
    return ("click", {"element": button}) if button else None


def _play_vote(goal: str, pages: list[Shown]) -> Move:
    found = re.match(r"Vote for the (\w+) candidate", goal)
    assert found is not None
    buttons = re.findall(r"\[(\d+)\] button", "\n".join(pages[-1].lines))
    return ("click", {"element": int(buttons[PLACES.index(found[1])])}) if buttons else None


_PLAYERS: dict[str, Callable[[str, list[Shown]], Move]] = {
    "form": _play_form,
    "shop": _play_shop,
    "wiki": _play_wiki,
    "table": _play_table,
    "vote": _play_vote,
}
