"""Weights over HTTP: each host of the trainer serves its processes' files of a version, with ranges, for the token.

The files are those of the filesystem transport, in folders that no other host has to see. An engine fetches them in
ranges, again where a connection broke, and verifies the version by its fingerprint. It fetches them from an engine that
came before it, where there is one, while that one still receives them: the trainer's hosts send a version once. Where
an engine fails, those below it go on with the one above it, in the end with the trainer's hosts.
"""

import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from headway.base.addresses import own_address
from headway.base.errors import HeadwayError, UsageError
from headway.base.files import write_atomic
from headway.config.shared import HttpWeights, TlsSettings
from headway.core.control import RunControl
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.announcements import announce
from headway.transport.control.tokens import find_token, is_bearer
from headway.transport.http_client import AnswerError, HttpClient, UnreachableError, check_trusted
from headway.transport.http_thread import HttpThread
from headway.transport.tls import scheme, server_context
from headway.transport.weights.filesystem import (
    MANIFEST,
    Manifest,
    file_of,
    make_empty,
    read_files,
    unfinished,
    write_shards,
)
from headway.transport.weights.layout import Arrival, Layout
from headway.transport.weights.mapped_memory import MappedMemory
from headway.transport.weights.publish import WeightSender
from headway.transport.weights.relays.files import NOT_YET, ArrivingFiles, FileRelay
from headway.transport.weights.relays.tree import ancestors
from headway.transport.weights.shards import Shard

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 25
"""Bytes of one request."""
_DOWNLOADS = 4
_ATTEMPTS = 5
_RELAY_SECONDS = 10.0
"""Time in which an engine answers: well above what it waits for bytes, since another one can be asked."""
_PATIENCE_SECONDS = 60.0
_TREES_KEPT = 4
"""Versions whose engines are remembered."""
_VERSION = re.compile(r"v(\d{6,})")


class HttpSender(WeightSender):
    """Every process writes its shards into its host's folder; the first one of each host serves them."""

    def __init__(
        self, settings: HttpWeights, paths: RunPaths, policy: str, control: RunControl, tls: TlsSettings
    ) -> None:
        super().__init__(paths, policy)
        if control.token is None:
            raise UsageError('weights.type "http" needs the run\'s token: set HEADWAY_TOKEN')
        # The version before the newest always stays: an engine may be reading it.
        self._keep_last = max(settings.keep_last, 2)
        self._server: HttpThread | None = None
        url = ""
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            host = settings.host or control.address
            context = server_context(tls, host)
            self._server = HttpThread(version_app(paths, control.token), host, settings.port, "weights", context)
            url = f"{scheme(context)}://{host}:{self._server.port}"
            if context is not None:
                check_trusted(url)
        self._urls = _of_hosts(self._publishers.gather(url))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _store(self, version: int, shards: Iterator[Shard]) -> tuple[Layout, dict[str, Any]]:
        folder = self._paths.version(version)
        if self._server is not None:
            make_empty(unfinished(folder))
        self._publishers.barrier()
        layout = self._gather(write_shards(unfinished(folder), self._rank, shards))
        if self._server is not None:
            write_atomic(unfinished(folder) / MANIFEST, msgspec.json.encode(Manifest(version, layout)), durable=False)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished(folder).rename(folder)
            self._remove_old(version)
        self._publishers.barrier()  # an engine that reads the announcement finds every host ready
        return layout, {"type": "http", "urls": self._urls}

    def _announce(self, update: WeightUpdate, layout: Layout) -> None:
        announce(self._paths, update, keep_last=self._keep_last, durable=False)

    def _remove_old(self, newest: int) -> None:
        """Remove the folders of versions that are no longer kept, or that come after one the run went back to."""
        found = {int(m[1]): entry for entry in self._paths.weights.iterdir() if (m := _VERSION.fullmatch(entry.name))}
        kept = sorted(version for version in found if version <= newest)[-self._keep_last :]
        for version in found.keys() - set(kept):
            shutil.rmtree(found[version], ignore_errors=True)


def version_app(paths: RunPaths, token: str) -> web.Application:
    """Serve the files of published versions to those who have the token."""

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        if not is_bearer(request.headers.get("Authorization"), token):
            raise web.HTTPUnauthorized(reason="these weights demand the run's token")
        response: web.StreamResponse = await handler(request)
        return response

    def path(request: web.Request) -> Path:
        found = paths.version(int(request.match_info["version"])) / request.match_info["file"]
        if not found.is_file():
            raise web.HTTPNotFound(reason="this version is no longer held here")
        return found

    async def size(request: web.Request) -> web.Response:
        return web.json_response(path(request).stat().st_size)

    async def content(request: web.Request) -> web.FileResponse:
        return web.FileResponse(path(request))

    engines: dict[int, list[str]] = {}

    async def join(request: web.Request) -> web.Response:
        """Give an engine its place among those that fetch a version, and the addresses of those above it."""
        version = int(request.match_info["version"])
        url = msgspec.json.decode(await request.read(), type=str)
        if version not in engines:
            for old in sorted(engines)[: -_TREES_KEPT + 1]:
                del engines[old]
        members = engines.setdefault(version, [])
        if url not in members:
            members.append(url)
        return web.json_response([members[place] for place in ancestors(members.index(url))])

    app = web.Application(middlewares=[guard])
    route = r"/v1/versions/{version:\d{1,9}}"
    file = route + r"/{file:manifest\.json|rank_\d{5}\.safetensors}"
    app.add_routes([web.post(route + "/engines", join), web.get(file + "/size", size), web.get(file, content)])
    return app


def fetch(update: WeightUpdate, memory: MappedMemory) -> tuple[Layout, Iterator[Arrival]]:
    """Download a version's files, from engines that came before or from the trainer's hosts, and read them."""
    urls = [str(url) for url in update.transport["urls"]]
    folder = Path(tempfile.mkdtemp(prefix="headway-weights-"))
    relay = _relay(memory, urls[0])
    held, again = relay.hold(update.version, folder) if relay else (ArrivingFiles(update.version, folder), True)
    try:
        # What came from an engine the first time may be why there is a second.
        engines = [] if relay is None or again else _join(urls[0], update.version, relay.url)
        with ThreadPoolExecutor(_DOWNLOADS) as pool:
            _download([*engines, urls[0]], held, MANIFEST)
            layout = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest).layout
            ranks = sorted({part.rank for parts in layout.parts.values() for part in parts})
            for done in [pool.submit(_download, [*engines, urls[r]], held, file_of(r)) for r in ranks]:
                done.result()
    except BaseException as error:
        held.failed = True
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, IndexError | msgspec.DecodeError | OSError):
            raise HeadwayError(f"version {update.version} could not be fetched: {error}") from error
        raise
    return layout, _read_once(folder, layout)


def _relay(memory: MappedMemory, trainer: str) -> FileRelay | None:
    """The engine's own server of what it has fetched, at the address by which it reaches the trainer. None where the
    trainer speaks TLS and this engine could not: what came encrypted is not passed on in the clear."""
    relay = memory.relays.get("http")
    if isinstance(relay, FileRelay):
        return relay
    token = find_token()
    if token is None:
        raise HeadwayError("weights over HTTP need the run's token: set HEADWAY_TOKEN")
    host = own_address(urlsplit(trainer).hostname or "")
    tls = server_context(memory.tls, host)
    if tls is None and trainer.startswith("https:"):
        return None
    made = memory.relays["http"] = FileRelay(host, token, tls)
    return made


def _join(trainer: str, version: int, url: str) -> list[str]:
    """Take a place in the tree of a version. Returns the engines to fetch from, the best first."""
    http = HttpClient(trainer, find_token(), timeout=60.0)
    try:
        return msgspec.json.decode(
            http.request("POST", f"/v1/versions/{version}/engines", msgspec.json.encode(url)), type=list[str]
        )
    finally:
        http.close()


def _read_once(folder: Path, layout: Layout) -> Iterator[Arrival]:
    """Read the files; what is mapped stays after they are removed."""
    try:
        yield from read_files(folder, layout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(sources: list[str], held: ArrivingFiles, file: str) -> None:
    """Fetch a file in ranges from the first of `sources` that has it, and the rest from the next where that fails; the
    last is the trainer's host. Raises HeadwayError when that does not answer, or holds it no longer."""
    *engines, trainer = sources
    for engine in engines:
        try:
            _fetch_rest(HttpClient(engine, find_token(), timeout=_RELAY_SECONDS), held, file, _ask_again)
            return
        except (UnreachableError, AnswerError, UsageError) as error:
            logger.info("version %d goes on without the engine at %s: %s", held.version, engine, error)
    _fetch_rest(HttpClient(trainer, find_token(), timeout=60.0), held, file, _insist)


def _fetch_rest(http: HttpClient, held: ArrivingFiles, file: str, get: Callable[..., bytes]) -> None:
    route = f"/v1/versions/{held.version}/{file}"
    try:
        if (size := held.size(file)) is None:
            size = msgspec.json.decode(get(http, route + "/size"), type=int)
            held.start(file, size)
        for start in range(held.arrived(file), size, CHUNK_BYTES):
            held.append(file, get(http, route, (start, min(start + CHUNK_BYTES, size))))
    finally:
        http.close()


def _ask_again(http: HttpClient, route: str, span: tuple[int, int] | None = None) -> bytes:
    """Ask an engine, again as long as it still waits for these bytes itself."""
    give_up = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return http.request("GET", route, span=span)
        except AnswerError as error:
            if error.status != NOT_YET or time.monotonic() > give_up:
                raise


def _insist(http: HttpClient, route: str, span: tuple[int, int] | None = None) -> bytes:
    for attempt in range(_ATTEMPTS):
        try:
            return http.request("GET", route, span=span)
        except UnreachableError:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(0.2 * 2**attempt)
    raise AssertionError("unreachable")


def _of_hosts(urls: list[str]) -> list[str]:
    """Give every process the address of its host, which the host's first process has; hosts' processes are in order."""
    found: list[str] = []
    for url in urls:
        found.append(url or found[-1])
    return found
