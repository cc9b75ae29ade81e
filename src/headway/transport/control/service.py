"""The control service of a run: its folder's announcements over HTTP, for processes that do not share the folder.

It keeps nothing that matters in memory: what members announce goes to the run folder, and members tell again that they
are there. Every route demands the run's token.
"""

import asyncio
import re
import ssl
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from headway.base.errors import HeadwayError
from headway.core.control import NAME_PATTERN, Member, Role, RunState, TrainerHost
from headway.core.protocol import WeightUpdate
from headway.core.runs import RunPaths
from headway.transport.control.collected import CollectedFiles
from headway.transport.control.folder import FolderControl
from headway.transport.control.meeting import Meeting
from headway.transport.control.members import Members, RefusedError
from headway.transport.control.status import read_status
from headway.transport.control.tokens import is_bearer
from headway.transport.http_thread import HttpThread

MAX_BODY = 4 << 20
_EXPIRE_SECONDS = 1.0
_WAKES_PER_SECOND = 20.0
"""Runs of some dozens of members ask less often, and are answered at once; hundreds may wait for 50 ms."""
_REQUESTS_SECONDS = 0.25
"""Time for which what was asked of the run is not looked up again: hundreds of members beat several times in it."""
_SETTINGS = ("rl", "trainer", "orchestrator", "inference")
_ADDRESS = re.compile(r"tcp://[\w.:\[\]*-]+:\d{1,5}")
_CHECKED_URL = re.compile(r"https?://[\w.:\[\]-]+")
Body = TypeVar("Body")


class _Requests(NamedTuple):
    """Requests to engines and trainers in files of the folder, and the time at which those were read."""

    read: float
    stop: bool
    finished: bool
    rollouts: str


class ControlService:
    """The routes around one run folder. The owner of the run calls `serve`."""

    def __init__(self, paths: RunPaths, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._paths, self._token, self._clock = paths, token, clock
        self._folder = FolderControl(paths)
        self._files = CollectedFiles(paths)
        self.members = Members()
        self._meeting = Meeting()
        self._requests: _Requests | None = None
        self._id = uuid.uuid4().hex
        self.stop = False
        """Set when the owner of the run stops it; a request of someone else is a file in the folder."""
        self.ended = False
        self.app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        self.app.add_routes(
            [
                web.get("/v1/status", self._get_status),
                web.put("/v1/members/{name}", self._put_member),
                web.delete("/v1/members/{name}", self._delete_member),
                web.put("/v1/trainer_hosts/{name}", self._put_trainer_host),
                web.delete("/v1/trainer_hosts/{name}", self._delete_trainer_host),
                web.post("/v1/announcements", self._post_announcement),
                web.get("/v1/announcements/latest", self._get_latest),
                web.put("/v1/rollouts", self._put_rollouts),
                web.post("/v1/stop", self._post_stop),
                web.post("/v1/finish", self._post_finish),
                web.get("/v1/settings/{process}", self._get_settings),
                web.get("/v1/files/{folder}", self._list_files),
                web.get("/v1/files/{folder}/{name}", self._get_file),
                web.put("/v1/files/{folder}/{name}", self._put_file),
            ]
        )
        self.app.cleanup_ctx.append(self._expiring)

    def serve(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> HttpThread:
        """Serve from a thread until that is closed. Raises HeadwayError when it cannot listen there."""
        return HttpThread(self.app, host, port, "control", tls, _WAKES_PER_SECOND)

    def expire(self) -> None:
        """Take out members whose leases are over."""
        for member in self.members.expire(self._clock()):
            if member.role == "engine":
                self._folder.remove_engine(member.name)

    def present(self, *roles: Role) -> list[str]:
        """Return the names of members that play one of these roles now."""
        return [member.name for member in self.members.live(self._clock()) if member.role in roles]

    async def _expiring(self, _app: web.Application) -> Any:
        async def expire() -> None:
            while True:
                await asyncio.sleep(_EXPIRE_SECONDS)
                self.expire()

        task = asyncio.create_task(expire())
        yield
        task.cancel()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Let nobody through without the token, and answer failures with one line."""
        if not is_bearer(request.headers.get("Authorization"), self._token):
            return _error(401, "this service demands the run's token")
        try:
            return await handler(request)  # type: ignore[no-any-return]
        except RefusedError as error:
            return _error(409, str(error))
        except (msgspec.DecodeError, ValueError) as error:
            return _error(400, str(error))
        except HeadwayError as error:
            return _error(500, str(error))
        except web.HTTPException as error:
            return _error(error.status, error.reason)

    async def _put_member(self, request: web.Request) -> web.Response:
        member = await _read(request, Member)
        _check_member(member, request.match_info["name"])
        if self.members.join(member, self._clock()) and member.role == "engine":
            self._folder.add_engine(member.name, member.url)
        if member.role == "trainer":
            self._folder.report_checkpoints(member)
        return _reply(self._state(member.role))

    def _state(self, role: Role) -> RunState:
        folder = self._folder
        if role == "orchestrator":  # there is one, and it hears of a version as soon as it asks
            stop = self.stop or folder.stop_asked()
            return RunState(
                stop, False, self.ended, "", folder.latest(), folder.engines(), folder.checkpoints(), self._id
            )
        asked = self._read_requests()
        if role == "engine":
            return RunState(self.stop or asked.stop, ended=self.ended, service=self._id)
        return RunState(self.stop or asked.stop, asked.finished, self.ended, asked.rollouts, service=self._id)

    def _read_requests(self) -> _Requests:
        now, folder = self._clock(), self._folder
        if self._requests is None or now - self._requests.read >= _REQUESTS_SECONDS:
            self._requests = _Requests(now, folder.stop_asked(), folder.finished(), folder.rollouts() or "")
        return self._requests

    async def _delete_member(self, request: web.Request) -> web.Response:
        name, started = request.match_info["name"], float(request.query.get("started", "nan"))
        member = self.members.get(name, self._clock())
        if self.members.leave(name, started) and member is not None and member.role == "engine":
            self._folder.remove_engine(name)
        return _reply({})

    async def _put_trainer_host(self, request: web.Request) -> web.Response:
        host = await _read(request, TrainerHost)
        _check_trainer_host(host, request.match_info["name"])
        return _reply(self._meeting.join(host, self._clock()))

    async def _delete_trainer_host(self, request: web.Request) -> web.Response:
        self._meeting.leave(request.match_info["name"], float(request.query.get("started", "nan")))
        return _reply({})

    async def _get_status(self, _request: web.Request) -> web.Response:
        now = self._clock()
        status = await asyncio.to_thread(read_status, self._paths, self._folder)
        status.stop, status.ended = status.stop or self.stop, self.ended
        status.members, status.silent = self.members.live(now), dict(self.members.silent(now))
        return _reply(status)

    async def _post_announcement(self, request: web.Request) -> web.Response:
        update = await _read(request, WeightUpdate)
        if update.version < 0:
            raise ValueError("a version is not negative")
        self._folder.announce(update)
        return _reply({})

    async def _get_latest(self, _request: web.Request) -> web.Response:
        return _reply(self._folder.latest())

    async def _put_rollouts(self, request: web.Request) -> web.Response:
        address = await _read(request, str)
        if not _ADDRESS.fullmatch(address):
            raise ValueError("an address is tcp://HOST:PORT")
        self._folder.set_rollouts(address)
        self._requests = None
        return _reply({})

    async def _post_stop(self, _request: web.Request) -> web.Response:
        self._folder.ask_to_stop()
        self._requests = None
        return _reply({})

    async def _post_finish(self, _request: web.Request) -> web.Response:
        self._folder.finish()
        self._requests = None
        return _reply({})

    async def _get_settings(self, request: web.Request) -> web.Response:
        process = request.match_info["process"]
        if process not in _SETTINGS:
            raise web.HTTPNotFound(reason=f"there are settings of {', '.join(_SETTINGS)}")
        try:
            text = (self._paths.config / f"{process}.toml").read_text()
        except FileNotFoundError:
            raise web.HTTPNotFound(reason=f"this run has no settings of {process}") from None
        return web.Response(text=text, content_type="application/toml")

    async def _list_files(self, request: web.Request) -> web.Response:
        return _reply(self._files.sizes(request.match_info["folder"]))

    async def _get_file(self, request: web.Request) -> web.Response:
        info, offset = request.match_info, int(request.query.get("offset", "0"))
        return web.Response(body=self._files.read(info["folder"], info["name"], offset, MAX_BODY))

    async def _put_file(self, request: web.Request) -> web.Response:
        info, offset = request.match_info, int(request.query.get("offset", "-1"))
        return _reply(self._files.write(info["folder"], info["name"], offset, await request.read()))


def _check_member(member: Member, name: str) -> None:
    """Raise ValueError where a member is not what it may be."""
    if member.name != name or not re.fullmatch(NAME_PATTERN, name):
        raise ValueError("a member's name is letters, digits, '_', '.' and '-', at most 100, and that of its route")
    if member.role == "engine" and not _CHECKED_URL.fullmatch(member.url):
        raise ValueError("an engine has a url: http://HOST:PORT")
    if not member.host or len(member.host) > 255 or not 0 <= member.started < 1e11:
        raise ValueError("a member has a host and the time of its start")
    if member.checkpoints and (min(member.checkpoints) < 0 or member.checkpoints != sorted(set(member.checkpoints))):
        raise ValueError("checkpoints are steps in order")


def _check_trainer_host(host: TrainerHost, name: str) -> None:
    """Raise ValueError where a trainer's host is not what it may be."""
    if host.name != name or not re.fullmatch(NAME_PATTERN, name):
        raise ValueError("a host's name is letters, digits, '_', '.' and '-', at most 100, and that of its route")
    if not re.fullmatch(r"[\w.:-]{1,255}", host.address) or not 0 < host.port < 65536 or not 0 <= host.started < 1e11:
        raise ValueError("a host has an address, a port and the time of its start")
    if not 1 <= host.fewest <= host.most <= 100_000 or not 1 <= host.ranks <= 1024 or host.attempt < 0:
        raise ValueError("a host has ranks, and says how many hosts form a group")


async def _read(request: web.Request, kind: type[Body]) -> Body:
    return msgspec.json.decode(await request.read(), type=kind)


def _reply(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
