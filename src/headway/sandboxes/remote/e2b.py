"""The `e2b` back end: sandboxes that E2B rents out."""

import asyncio
import os
from typing import Any

from aiohttp import ClientError, ClientTimeout

from headway.sandboxes.remote.connect import HEADERS, read_output, start_request
from headway.sandboxes.remote.rented import IDLE_MINUTES, RentedBackend, RentedSandbox
from headway.sandboxes.sandbox import Limits, SandboxError, SandboxGoneError

_PORT = 49983
_USER = "user"


class E2b(RentedBackend):
    """Rents from E2B, by its REST interface. Memory, cpus and disk are those of the template."""

    name = "e2b"
    variable = "E2B_API_KEY"
    takes = 'a template, as in "e2b:base"'

    @property
    def domain(self) -> str:
        return os.environ.get("E2B_DOMAIN") or "e2b.app"

    def api(self, route: str) -> str:
        return (os.environ.get("E2B_API_URL") or f"https://api.{self.domain}") + route

    async def rent(self, limits: Limits) -> RentedSandbox:
        request = {"templateID": self.image, "timeout": 60 * IDLE_MINUTES, "allow_internet_access": False}
        headers = {"X-API-KEY": self.key}
        made = await self.ask("POST", self.api("/v2/sandboxes"), json=request, headers=headers)
        return E2bSandbox(self, made, limits)


class E2bSandbox(RentedSandbox):
    """One of E2B's. It is kept alive while its worker is."""

    def __init__(self, backend: E2b, made: dict[str, Any], limits: Limits) -> None:
        super().__init__(made["sandboxID"], limits)
        self._backend = backend
        self._domain = made.get("domain") or backend.domain
        self._url = os.environ.get("E2B_SANDBOX_URL") or f"https://{_PORT}-{self.name}.{self._domain}"
        self._headers = {"E2b-Sandbox-Id": self.name, "E2b-Sandbox-Port": str(_PORT)}
        if token := made.get("envdAccessToken"):
            self._headers["X-Access-Token"] = token
        self._keeping = asyncio.ensure_future(self._keep_alive())

    async def _keep_alive(self) -> None:
        route = self._backend.api(f"/sandboxes/{self.name}/timeout")
        while True:
            await asyncio.sleep(20.0 * IDLE_MINUTES)
            body = {"timeout": 60 * IDLE_MINUTES}
            await self._backend.call("POST", route, json=body, headers={"X-API-KEY": self._backend.key})

    async def shell(self, script: str, seconds: float) -> str:
        code, out, err = await run_by_connect(
            self._backend, f"{self._url}/process.Process/Start", self._headers, ["/bin/sh", "-c", script], seconds
        )
        if code:
            raise SandboxError(err.decode(errors="replace").strip()[-500:] or f"exit code {code}")
        return out.decode(errors="replace")

    async def put(self, path: str, data: bytes) -> None:
        headers = {**self._headers, "Content-Type": "application/octet-stream"}
        params = {"path": path, "username": _USER}
        await self._backend.call("POST", f"{self._url}/files", params=params, data=data, headers=headers)

    async def get(self, path: str) -> bytes:
        params = {"path": path, "username": _USER}
        return await self._backend.call("GET", f"{self._url}/files", params=params, headers=self._headers)

    async def expose(self, port: int) -> str:
        return f"https://{port}-{self.name}.{self._domain}"

    async def give_back(self) -> None:
        self._keeping.cancel()
        route = self._backend.api(f"/sandboxes/{self.name}")
        await self._backend.call("DELETE", route, headers={"X-API-KEY": self._backend.key})


async def run_by_connect(
    backend: RentedBackend, url: str, headers: dict[str, str], argv: list[str], seconds: float
) -> tuple[int, bytes, bytes]:
    """Run a command by Connect; returns exit code, stdout and stderr."""
    timeout = ClientTimeout(total=seconds + 60)
    given = {**headers, **HEADERS, "Connect-Timeout-Ms": str(int(1000 * (seconds + 30)))}
    try:
        async with backend.http.post(url, data=start_request(argv), headers=given, timeout=timeout) as answer:
            if answer.status != 200:
                said = (await answer.read())[:300].decode(errors="replace")
                raise SandboxError(f"{backend.name} answered a command with {answer.status}: {said}")
            return await read_output(answer.content)
    except (OSError, ClientError, TimeoutError, EOFError) as error:
        raise SandboxGoneError(f"the sandbox does not answer ({error or type(error).__name__})") from None
