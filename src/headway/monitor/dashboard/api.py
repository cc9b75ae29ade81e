"""The routes under /api: everything the dashboard shows, as JSON, read from run folders."""

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from headway.core.image_files import ImageFiles
from headway.core.images import IMAGE_TYPES
from headway.monitor.cost.ledger import read_ledger
from headway.monitor.dashboard import evaluations, logs, rollouts, timeline
from headway.monitor.dashboard.catalog import Catalog, RunData
from headway.monitor.dashboard.index import Filter
from headway.monitor.dashboard.live import Watcher
from headway.monitor.dashboard.settings import view_settings

SORTS = ("step", "reward", "advantage", "lag", "tokens", "seconds")
Handler = Callable[[RunData, "Query"], Any]


class Query:
    """The parameters of a request; values that cannot be read are answered with 400."""

    def __init__(self, request: web.Request) -> None:
        self.path, self._query = request.match_info, request.query

    def text(self, name: str, default: str = "") -> str:
        return self._query.get(name, default)[:1000]

    def texts(self, name: str) -> list[str]:
        return self._query.getall(name, [])

    def number(self, name: str, default: float) -> float:
        try:
            value = float(self._query.get(name) or default)
        except ValueError:
            raise web.HTTPBadRequest(text=f"{name} must be a number") from None
        return default if math.isnan(value) else value

    def integer(self, name: str, default: int, low: int = 0, high: int = 2**53) -> int:
        return int(min(max(self.number(name, default), low), high))

    def optional(self, name: str) -> int | None:
        return self.integer(name, 0) if self._query.get(name) else None

    def filter(self) -> Filter:
        sort = self.text("sort", "step")
        if sort not in SORTS:
            raise web.HTTPBadRequest(text=f"sort must be one of {', '.join(SORTS)}")
        return Filter(
            step=self.optional("step"),
            env=self.text("env"),
            error=self.text("error"),
            group=self.text("group"),
            min_reward=self.number("min_reward", -math.inf),
            max_reward=self.number("max_reward", math.inf),
            sort=sort,
            descending=self.text("order", "desc") != "asc",
        )


def detail(view: RunData, query: Query) -> Any:
    tables = view.tables()
    return {
        "processes": {name: {"names": table.names, "rows": len(table)} for name, table in tables.items()},
        "restarts": timeline.restarts(view.paths, tables),
    }


def series(view: RunData, query: Query) -> Any:
    """Read the columns named by any number of `name` parameters, each `process:metric`, or `process:*` for all."""
    wanted: dict[str, list[str]] = {}
    for full in query.texts("name"):
        process, _, name = full.partition(":")
        wanted.setdefault(process, []).append(name)
    points = query.integer("points", 600, 2, 200_000)
    low, high = query.number("from", -math.inf), query.number("to", math.inf)
    tables = view.tables()
    return {
        process: tables[process].select(tables[process].names if "*" in names else names, points, low, high)
        for process, names in wanted.items()
        if process in tables
    }


def lanes(view: RunData, query: Query) -> Any:
    tables = view.tables()
    low, high = query.number("from", -math.inf), query.number("to", math.inf)
    return {
        "lanes": timeline.lanes(tables, low, high),
        "levels": timeline.levels(tables, low, high, 1000),
        "restarts": timeline.restarts(view.paths, tables),
    }


def heat(view: RunData, query: Query) -> Any:
    view.index.refresh()
    column = "reward" if query.text("column") == "reward" else "lag"
    counted = view.index.heat(column, query.integer("buckets", 100, 1, 400), 24, query.text("env"))
    return counted | {"progress": view.index.progress()}


def rollout_page(view: RunData, query: Query) -> Any:
    wanted, text = query.filter(), query.text("q")
    view.index.refresh(wanted.step)
    offset, limit = query.integer("offset", 0), query.integer("limit", 100, 1, 500)
    if text:
        answer = rollouts.search(view.index, wanted, text, offset, limit)
    else:
        answer = rollouts.page(view.index, wanted, offset, limit)
    return answer | {"rows": view.previews.add_to(answer["rows"]), "progress": view.index.progress()}


def evaluation_rounds(view: RunData, query: Query) -> Any:
    return evaluations.rounds(view.paths.evaluations)


def evaluation_page(view: RunData, query: Query) -> Any:
    offset, limit = query.integer("offset", 0), query.integer("limit", 50, 1, 500)
    return evaluations.round_page(view.paths.evaluations, query.path["round"], offset, limit)


def rollout(view: RunData, query: Query) -> Any:
    record = rollouts.read_record(view.index, int(query.path["step"]), int(query.path["line"]))
    return rollouts.view_record(record)


def tokens(view: RunData, query: Query) -> Any:
    record = rollouts.read_record(view.index, int(query.path["step"]), int(query.path["line"]))
    place = query.integer("trace", 0), query.integer("branch", 0)
    return rollouts.view_tokens(
        record, view.paths, *place, query.integer("offset", 0), query.integer("limit", 2000, 1, 5000)
    )


def image(view: RunData, query: Query) -> Any:
    """An image that a rollout shows. Raises KeyError for one that is not there, or of no known type: a browser may show
    these files as images only."""
    digest = query.path["digest"]
    try:
        data = ImageFiles(view.paths.images).load(digest)
    except ValueError:
        raise KeyError(f"image {digest}") from None
    kind = next((kind for start, kind in IMAGE_TYPES.items() if data.startswith(start)), None)
    if kind is None:
        raise KeyError(f"image {digest} of a known type")
    # Its name is the hash of its bytes, so that it never changes.
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}
    return web.Response(body=data, content_type=f"image/{kind}", headers=headers)


def log_list(view: RunData, query: Query) -> Any:
    return logs.log_files(view.paths.logs)


def log(view: RunData, query: Query) -> Any:
    name, text = query.path["log"], query.text("q")
    if text:
        return logs.search_log(view.paths.logs, name, text)
    return logs.read_piece(view.paths.logs, name, query.optional("end"), query.optional("since"))


def settings(view: RunData, query: Query) -> Any:
    return view_settings(view.paths)


def audit(view: RunData, query: Query) -> Any:
    return view.audit()


def cost(view: RunData, query: Query) -> Any:
    ledger = read_ledger(view.paths)
    more = {"money": ledger.money, "idle_money": ledger.idle_money, "rates": ledger.rates()}
    return msgspec.to_builtins(ledger) | more


ROUTES: dict[str, Handler] = {
    "": detail,
    "/series": series,
    "/lanes": lanes,
    "/heat": heat,
    "/rollouts": rollout_page,
    r"/rollouts/{step:\d{1,9}}/{line:\d{1,9}}": rollout,
    r"/rollouts/{step:\d{1,9}}/{line:\d{1,9}}/tokens": tokens,
    r"/images/{digest:[0-9a-f]{32}}": image,
    "/evaluations": evaluation_rounds,
    "/evaluations/{round}": evaluation_page,
    "/logs": log_list,
    "/logs/{log}": log,
    "/settings": settings,
    "/audit": audit,
    "/cost": cost,
}


def add_routes(app: web.Application, catalog: Catalog, more: Mapping[str, Handler]) -> None:
    """Add all routes, and `more` of them. Reading files blocks, so every answer is made in a thread."""
    app.router.add_get("/api/runs", partial(_runs, catalog))
    for path, handler in {**ROUTES, **more}.items():
        app.router.add_get("/api/runs/{run}" + path, partial(_of_run, catalog, handler))
    watcher = Watcher(catalog)
    app.router.add_get("/api/events", partial(_events, watcher))

    async def close(app: web.Application) -> None:
        await watcher.close()
        catalog.close()

    app.on_shutdown.append(close)


async def _runs(catalog: Catalog, request: web.Request) -> web.Response:
    return _json({"folder": catalog.folder.name, "runs": await asyncio.to_thread(catalog.summaries)})


async def _of_run(catalog: Catalog, handler: Handler, request: web.Request) -> web.Response:
    query = Query(request)

    def answer() -> Any:
        return handler(catalog.view(request.match_info["run"]), query)

    try:
        found = await asyncio.to_thread(answer)
    except KeyError as error:
        raise web.HTTPNotFound(text=f"there is no {error.args[0]}") from None
    return found if isinstance(found, web.Response) else _json(found)


async def _events(watcher: Watcher, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    async with aclosing(watcher.changes()) as changes:
        await anext(changes)  # a browser that is connected misses nothing
        await response.prepare(request)
        with suppress(ConnectionResetError):  # the browser closed the connection
            await response.write(b"retry: 2000\n\n")
            async for names in changes:
                await response.write(b"data: " + msgspec.json.encode(names) + b"\n\n")
    return response


def _json(value: Any) -> web.Response:
    response = web.Response(body=msgspec.json.encode(value), content_type="application/json")
    response.headers["Cache-Control"] = "no-store"
    response.enable_compression()
    return response
