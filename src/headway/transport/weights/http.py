"""Weights over HTTP: each host of the trainer serves its processes' files of a version, with ranges, for the token.

The files are those of the filesystem transport, in folders that no other host has to see. An engine fetches them in
ranges, again where a connection broke, and verifies the version by its fingerprint.
"""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from headway.config.shared import HttpWeights, TlsSettings
from headway.core.control import RunControl
from headway.core.errors import HeadwayError, UsageError
from headway.core.files import write_atomic
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.control.tokens import find_token, is_bearer
from headway.transport.http_client import HttpClient, UnreachableError, check_trusted
from headway.transport.http_thread import HttpThread
from headway.transport.tls import scheme, server_context
from headway.transport.weights.announcements import announce
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
from headway.transport.weights.shards import Shard

CHUNK_BYTES = 1 << 25
"""Bytes of one request."""
_DOWNLOADS = 4
_ATTEMPTS = 5
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

    def folder(request: web.Request) -> Path:
        found = paths.version(int(request.match_info["version"]))
        if not found.is_dir():
            raise web.HTTPNotFound(reason="this version is no longer held")
        return found

    async def sizes(request: web.Request) -> web.Response:
        return web.json_response({entry.name: entry.stat().st_size for entry in folder(request).iterdir()})

    async def content(request: web.Request) -> web.FileResponse:
        return web.FileResponse(folder(request) / request.match_info["file"])

    app = web.Application(middlewares=[guard])
    app.add_routes(
        [
            web.get(r"/v1/versions/{version:\d{1,9}}", sizes),
            web.get(r"/v1/versions/{version:\d{1,9}}/{file:manifest\.json|rank_\d{5}\.safetensors}", content),
        ]
    )
    return app


def fetch(update: WeightUpdate, _memory: MappedMemory) -> tuple[Layout, Iterator[Arrival]]:
    """Download a version's files, from all hosts at the same time, and read them."""
    urls = [str(url) for url in update.transport["urls"]]
    folder = Path(tempfile.mkdtemp(prefix="headway-weights-"))
    try:
        with ThreadPoolExecutor(_DOWNLOADS) as pool:
            _download(urls[0], update.version, MANIFEST, folder)
            layout = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest).layout
            ranks = sorted({part.rank for parts in layout.parts.values() for part in parts})
            for done in [pool.submit(_download, urls[r], update.version, file_of(r), folder) for r in ranks]:
                done.result()
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, IndexError | msgspec.DecodeError | OSError):
            raise HeadwayError(f"version {update.version} could not be fetched: {error}") from error
        raise
    return layout, _read_once(folder, layout)


def _read_once(folder: Path, layout: Layout) -> Iterator[Arrival]:
    """Read the files; what is mapped stays after they are removed."""
    try:
        yield from read_files(folder, layout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(url: str, version: int, file: str, folder: Path) -> None:
    """Fetch a file in ranges. Raises HeadwayError when the trainer's host does not answer, or holds it no longer."""
    http = HttpClient(url, find_token(), timeout=60.0)
    route = f"/v1/versions/{version}"
    size = msgspec.json.decode(_insist(http, route), type=dict[str, int]).get(file)
    if size is None:
        raise HeadwayError(f"{url} has no {file} of version {version}")
    with (folder / file).open("wb") as target:
        for start in range(0, size, CHUNK_BYTES):
            target.write(_insist(http, f"{route}/{file}", (start, min(start + CHUNK_BYTES, size))))
    http.close()


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
