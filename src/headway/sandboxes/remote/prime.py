"""The `prime` back end: sandboxes that Prime Intellect rents out."""

import asyncio
import os
import uuid
from typing import Any

from aiohttp import FormData

from headway.sandboxes.remote.e2b import run_by_connect
from headway.sandboxes.remote.rented import IDLE_MINUTES, RentedBackend, RentedSandbox
from headway.sandboxes.sandbox import Limits, SandboxError

_LIFE_MINUTES = 24 * 60
_POLL_SECONDS = 1.0
_START_SECONDS = 600.0
_FAILED = ("ERROR", "TERMINATED", "TIMEOUT")


class Prime(RentedBackend):
    """Rents from Prime, by its REST interface."""

    name = "prime"
    variable = "PRIME_API_KEY"
    takes = 'an image, as in "prime:python:3.12-slim"'

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def api(self, route: str) -> str:
        return (os.environ.get("PRIME_API_BASE_URL") or "https://api.primeintellect.ai") + "/api/v1" + route

    async def rent(self, limits: Limits) -> RentedSandbox:
        request: dict[str, Any] = {
            "name": f"headway-{uuid.uuid4().hex[:12]}",
            "docker_image": self.image,
            "vm": True,
            "cpu_cores": limits.cpus,
            "memory_gb": limits.memory / 2**30,
            "disk_size_gb": max(1.0, limits.disk / 2**30),
            "network_allowlist": [],
            "timeout_minutes": _LIFE_MINUTES,
            "idle_timeout_minutes": IDLE_MINUTES,
            "idempotency_key": uuid.uuid4().hex,
        }
        if team := os.environ.get("PRIME_TEAM_ID"):
            request["team_id"] = team
        made = await self.ask("POST", self.api("/sandbox"), json=request, headers=self.headers)
        box = PrimeSandbox(self, made["id"], limits)
        try:
            async with asyncio.timeout(_START_SECONDS):
                while made["status"] != "RUNNING":
                    if made["status"] in _FAILED:
                        raise SandboxError(f"prime could not start a sandbox: {made.get('errorMessage')}")
                    await asyncio.sleep(_POLL_SECONDS)
                    made = await self.ask("GET", self.api(f"/sandbox/{box.name}"), headers=self.headers)
            await box.enter()
        except BaseException:
            await box.stop()
            raise
        return box


class PrimeSandbox(RentedSandbox):
    """One of Prime's, behind a gateway with a token of its own, which is renewed when it is refused."""

    def __init__(self, backend: Prime, name: str, limits: Limits) -> None:
        super().__init__(name, limits)
        self._backend = backend
        self._url, self._headers = "", {"": ""}

    async def enter(self) -> None:
        """Get the address and the token of the gateway."""
        route = self._backend.api(f"/sandbox/{self.name}/auth")
        given = await self._backend.ask("POST", route, headers=self._backend.headers)
        self._url = f"{given['gateway_url'].rstrip('/')}/{given['user_ns']}/{given['job_id']}"
        self._headers = {"Authorization": f"Bearer {given['token']}"}

    async def shell(self, script: str, seconds: float) -> str:
        argv = ["/bin/sh", "-c", script]
        for attempt in (1, 2):
            try:
                route = f"{self._url}/command_session.CommandSession/Start"
                code, out, err = await run_by_connect(self._backend, route, self._headers, argv, seconds)
                break
            except SandboxError as error:
                if attempt == 2 or not ("401" in str(error) or "unauthenticated" in str(error)):
                    raise
                await self.enter()  # a refused command has not run
        if code:
            raise SandboxError(err.decode(errors="replace").strip()[-500:] or f"exit code {code}")
        return out.decode(errors="replace")

    async def put(self, path: str, data: bytes) -> None:
        form = FormData()
        form.add_field("file", data, filename=path.rpartition("/")[2])
        await self._gateway("POST", "/upload", path, data=form)

    async def get(self, path: str) -> bytes:
        return await self._gateway("GET", "/download", path)

    async def _gateway(self, method: str, route: str, path: str, **request: Any) -> bytes:
        params = {"path": path, "sandbox_id": self.name}
        return await self._backend.call(method, self._url + route, params=params, headers=self._headers, **request)

    async def expose(self, port: int) -> str:
        raise SandboxError("Prime's sandboxes show no ports by this interface")

    async def give_back(self) -> None:
        await self._backend.call("DELETE", self._backend.api(f"/sandbox/{self.name}"), headers=self._backend.headers)
