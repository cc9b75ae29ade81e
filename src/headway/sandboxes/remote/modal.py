"""The `modal` back end: sandboxes that Modal rents out, by its SDK, because its interface is not HTTP."""

import importlib
import importlib.util
import math
from typing import Any

from headway.sandboxes.remote.rented import IDLE_MINUTES, RentedBackend, RentedSandbox
from headway.sandboxes.sandbox import Limits, SandboxError, SandboxUnavailableError

_APP = "headway"
_LIFE_SECONDS = 24 * 60 * 60


class Modal(RentedBackend):
    """Rents from Modal. Disk is what Modal grants."""

    name = "modal"
    variable = "MODAL_TOKEN_ID"
    takes = 'an image, as in "modal:python:3.12-slim"'

    @classmethod
    def check(cls) -> None:
        if importlib.util.find_spec("modal") is None:
            raise SandboxUnavailableError('sandboxes of kind "modal" need its SDK: pip install modal; modal setup')

    async def rent(self, limits: Limits) -> RentedSandbox:
        modal: Any = importlib.import_module("modal")
        try:
            app = await modal.App.lookup.aio(_APP, create_if_missing=True)
            made = await modal.Sandbox.create.aio(
                "sleep",
                "infinity",
                app=app,
                image=modal.Image.from_registry(self.image),
                timeout=_LIFE_SECONDS,
                idle_timeout=60 * IDLE_MINUTES,
                cpu=limits.cpus,
                memory=math.ceil(limits.memory / 2**20),
                block_network=True,
            )
        except Exception as error:  # the SDK's own, which this machine may not have
            raise SandboxError(f"modal could not start a sandbox: {error}") from error
        return ModalSandbox(made, limits)


class ModalSandbox(RentedSandbox):
    """One of Modal's, as an object of its SDK."""

    def __init__(self, made: Any, limits: Limits) -> None:
        super().__init__(made.object_id, limits)
        self._made = made

    async def shell(self, script: str, seconds: float) -> str:
        try:
            process = await self._made.exec.aio("sh", "-c", script, timeout=math.ceil(seconds) + 30)
            out, err = await process.stdout.read.aio(), await process.stderr.read.aio()
            code = await process.wait.aio()
        except Exception as error:
            raise SandboxError(f"modal could not run a command: {error}") from error
        if code:
            raise SandboxError(err.strip()[-500:] or f"exit code {code}")
        return str(out)

    async def put(self, path: str, data: bytes) -> None:
        try:
            await self._made.filesystem.write_bytes.aio(data, path)
        except Exception as error:
            raise SandboxError(str(error)) from error

    async def get(self, path: str) -> bytes:
        try:
            return bytes(await self._made.filesystem.read_bytes.aio(path))
        except Exception as error:
            raise SandboxError(str(error)) from error

    async def expose(self, port: int) -> str:
        raise SandboxError("Modal's sandboxes without network show no ports")

    async def give_back(self) -> None:
        await self._made.terminate.aio()
