"""The `daytona` back end: sandboxes that Daytona rents out."""

import asyncio
import math
import os
from typing import Any

from aiohttp import FormData

from headway.sandboxes.remote.rented import IDLE_MINUTES, RentedBackend, RentedSandbox
from headway.sandboxes.sandbox import Limits, SandboxError

_POLL_SECONDS = 0.5
_START_SECONDS = 300.0
_FAILED = ("error", "build_failed", "destroyed", "destroying")


class Daytona(RentedBackend):
    """Rents from Daytona, by its REST interface. Cpus, memory and disk are whole numbers of cores and GiB there."""

    name = "daytona"
    variable = "DAYTONA_API_KEY"
    takes = 'a snapshot of Daytona\'s, as in "daytona:my-snapshot"'

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def api(self, route: str) -> str:
        return (os.environ.get("DAYTONA_API_URL") or "https://app.daytona.io/api") + route

    async def rent(self, limits: Limits) -> RentedSandbox:
        request = {
            "snapshot": self.image,
            "networkBlockAll": True,
            "autoStopInterval": IDLE_MINUTES,
            "autoDeleteInterval": 0,  # once it is stopped
            "cpu": math.ceil(limits.cpus),
            "memory": math.ceil(limits.memory / 2**30),
            "disk": math.ceil(limits.disk / 2**30),
        }
        made = await self.ask("POST", self.api("/sandbox"), json=request, headers=self.headers)
        box = DaytonaSandbox(self, made, limits)
        try:
            async with asyncio.timeout(_START_SECONDS):
                while made["state"] != "started":
                    if made["state"] in _FAILED:
                        raise SandboxError(f"daytona could not start a sandbox: {made.get('errorReason')}")
                    await asyncio.sleep(_POLL_SECONDS)
                    made = await self.ask("GET", self.api(f"/sandbox/{box.name}"), headers=self.headers)
        except BaseException:
            await box.stop()
            raise
        return box


class DaytonaSandbox(RentedSandbox):
    """One of Daytona's. The service stops it when nothing was asked of it for a while, and then deletes it."""

    def __init__(self, backend: Daytona, made: dict[str, Any], limits: Limits) -> None:
        super().__init__(made["id"], limits)
        self._backend = backend
        self._toolbox = f"{made['toolboxProxyUrl'].rstrip('/')}/{self.name}"

    async def shell(self, script: str, seconds: float) -> str:
        # What it runs a command with, zsh or bash or sh, is the service's choice.
        request = {"command": f"sh -c {_quoted(script)}", "timeout": math.ceil(seconds) + 30}
        route = f"{self._toolbox}/process/execute"
        done = await self._backend.ask("POST", route, json=request, headers=self._backend.headers, seconds=seconds)
        if done.get("exitCode"):
            raise SandboxError(str(done.get("result", "")).strip()[-500:] or f"exit code {done['exitCode']}")
        return str(done.get("result", ""))

    async def put(self, path: str, data: bytes) -> None:
        form = FormData()
        form.add_field("files[0].path", path)
        form.add_field("files[0].file", data, filename=path, content_type="application/octet-stream")
        route = f"{self._toolbox}/files/bulk-upload"
        await self._backend.call("POST", route, data=form, headers=self._backend.headers)

    async def get(self, path: str) -> bytes:
        route = f"{self._toolbox}/files/download"
        return await self._backend.call("GET", route, params={"path": path}, headers=self._backend.headers)

    async def expose(self, port: int) -> str:
        route = self._backend.api(f"/sandbox/{self.name}/ports/{port}/signed-preview-url")
        return str((await self._backend.ask("GET", route, headers=self._backend.headers))["url"])

    async def give_back(self) -> None:
        await self._backend.call("DELETE", self._backend.api(f"/sandbox/{self.name}"), headers=self._backend.headers)


def _quoted(script: str) -> str:
    return "'" + script.replace("'", "'\"'\"'") + "'"
