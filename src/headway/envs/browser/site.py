"""A web site of one episode: it answers the browser's requests, and its own state says how far the task is done."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from random import Random
from typing import ClassVar
from urllib.parse import parse_qsl, urlsplit


@dataclass(frozen=True)
class Request:
    """A request as a site gets it; of fields that came several times the last one counts."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, method: str, url: str, body: str) -> "Request":
        parts = urlsplit(url)
        fields = dict(parse_qsl(body, keep_blank_values=True))
        return cls(method, parts.path or "/", dict(parse_qsl(parts.query, keep_blank_values=True)), fields)


@dataclass(frozen=True)
class Response:
    """A page, or the way to one."""

    body: str = ""
    status: int = 200
    location: str | None = None


class Site(ABC):
    """Made from a seed: the same seed makes the same pages and the same task.

    `name` is its kind. The browser finds it at `http://NAME.test/`. Nothing in the pages tells if the task is done.
    """

    name: ClassVar[str]

    def __init__(self, seed: int) -> None:
        self.random = Random(f"{self.name}/{seed}")
        self.goal = ""
        """The task, in words."""

    @property
    def host(self) -> str:
        return f"{self.name}.test"

    @abstractmethod
    def handle(self, request: Request) -> Response:
        """Answer a request, and change the site's state where the request says so."""

    @abstractmethod
    def progress(self) -> float:
        """Return the share of the task that is done, from the site's state; 1 only if all of it and nothing else is."""


def page(title: str, *body: str, status: int = 200) -> Response:
    """Make a page; `body` is HTML."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
    return Response(f"{head}<body><h1>{escape(title)}</h1>{''.join(body)}</body></html>", status)


def redirect(location: str) -> Response:
    return Response(status=303, location=location)


def not_found() -> Response:
    return page("Not found", "<p>There is no such page.</p><p><a href='/'>Home</a></p>", status=404)


def link(href: str, text: str) -> str:
    return f'<a href="{escape(href)}">{escape(text)}</a>'
