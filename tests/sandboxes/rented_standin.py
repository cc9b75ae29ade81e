"""A stand-in for the HTTP interfaces of E2B, Daytona and Prime: their routes, with bubblewrap sandboxes behind them.

Written from what their SDKs send (e2b 2.63, daytona 0.226, prime-sandboxes 0.5). Runs by itself; prints its port.
"""

import asyncio
import json
import os

from aiohttp import BodyPartReader, web

from headway.sandboxes.local.bubblewrap import Bubblewrap
from headway.sandboxes.remote.connect import fields, frame
from headway.sandboxes.sandbox import Limits, Sandbox, SandboxError

KEY = "key-of-the-stand-in"
TOKEN = "token-of-a-sandbox"


def field(number: int, data: bytes) -> bytes:
    size = bytearray()
    length = len(data)
    while length > 0x7F:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([number << 3 | 2, *size, length]) + data


class StandIn:
    def __init__(self) -> None:
        self._backend = Bubblewrap()
        self._boxes: dict[str, Sandbox] = {}
        self._tokens: dict[str, int] = {}
        self.url = ""
        self.app = web.Application(client_max_size=1 << 30)
        self.app.add_routes(
            [
                web.get("/boxes", self.count),
                web.post("/e2b/v2/sandboxes", self.e2b_create),
                web.post("/e2b/sandboxes/{name}/timeout", self.nothing),
                web.delete("/e2b/sandboxes/{name}", self.delete),
                web.post("/envd/process.Process/Start", self.e2b_start),
                web.post("/envd/files", self.e2b_put),
                web.get("/envd/files", self.e2b_get),
                web.post("/daytona/sandbox", self.daytona_create),
                web.get("/daytona/sandbox/{name}", self.daytona_state),
                web.delete("/daytona/sandbox/{name}", self.delete),
                web.get("/daytona/sandbox/{name}/ports/{port}/signed-preview-url", self.daytona_port),
                web.post("/toolbox/{name}/process/execute", self.daytona_execute),
                web.post("/toolbox/{name}/files/bulk-upload", self.daytona_put),
                web.get("/toolbox/{name}/files/download", self.download),
                web.post("/prime/api/v1/sandbox", self.prime_create),
                web.get("/prime/api/v1/sandbox/{name}", self.prime_state),
                web.post("/prime/api/v1/sandbox/{name}/auth", self.prime_auth),
                web.delete("/prime/api/v1/sandbox/{name}", self.delete),
                web.post("/gateway/ns/{name}/command_session.CommandSession/Start", self.prime_start),
                web.post("/gateway/ns/{name}/upload", self.prime_put),
                web.get("/gateway/ns/{name}/download", self.download),
            ]
        )

    async def create(self) -> str:
        box = await self._backend.create(limits=Limits(output=100 << 20))
        self._boxes[box.name] = box
        return box.name

    def box(self, name: str) -> Sandbox:
        if name not in self._boxes:
            raise web.HTTPNotFound(text="no such sandbox")
        return self._boxes[name]

    async def count(self, _request: web.Request) -> web.Response:
        return web.json_response(len(self._boxes))

    async def nothing(self, _request: web.Request) -> web.Response:
        return web.json_response({})

    async def delete(self, request: web.Request) -> web.Response:
        check(request.headers.get("X-API-KEY") or request.headers.get("Authorization"))
        await self.box(request.match_info["name"]).stop()
        del self._boxes[request.match_info["name"]]
        return web.Response(status=204)

    async def put(self, box: Sandbox, path: str, data: bytes) -> None:
        await box.write(path, data)

    async def send_file(self, box: Sandbox, path: str) -> web.Response:
        try:
            return web.Response(body=await box.read(path))
        except SandboxError as error:
            raise web.HTTPNotFound(text=str(error)) from None

    async def stream(self, request: web.Request, box: Sandbox) -> web.StreamResponse:
        """Answer a Connect request that starts a command."""
        assert request.headers["Content-Type"] == "application/connect+proto"
        body = await request.read()
        command = fields(fields(body[5:])[1][0])
        argv = [word.decode() for word in (*command[1], *command.get(2, []))]
        answer = web.StreamResponse(headers={"Content-Type": "application/connect+proto"})
        await answer.prepare(request)
        done = await box.run(argv, seconds=600)
        await answer.write(frame(field(1, field(1, b"\x08\x07"))))  # started, as process 7
        for number, text in ((1, done.stdout), (2, done.stderr)):
            data = text.encode()
            for at in range(0, len(data), 1 << 15):
                await answer.write(frame(field(1, field(2, field(number, data[at : at + (1 << 15)])))))
        await answer.write(frame(field(1, field(4, b""))))  # a sign of life
        await answer.write(frame(field(1, field(3, b"\x08" + bytes([2 * done.exit_code & 0x7F]) + b"\x10\x01"))))
        await answer.write(frame(b"{}", 2))
        return answer

    async def e2b_create(self, request: web.Request) -> web.Response:
        check(request.headers.get("X-API-KEY"))
        asked = await request.json()
        assert asked["templateID"] == "base" and asked["allow_internet_access"] is False and asked["timeout"] > 0
        made = {"sandboxID": await self.create(), "templateID": "base", "envdVersion": "0.4.0", "clientID": ""}
        return web.json_response({**made, "envdAccessToken": TOKEN, "domain": None}, status=201)

    def envd(self, request: web.Request) -> Sandbox:
        check(request.headers.get("X-Access-Token"), TOKEN)
        return self.box(request.headers["E2b-Sandbox-Id"])

    async def e2b_start(self, request: web.Request) -> web.StreamResponse:
        return await self.stream(request, self.envd(request))

    async def e2b_put(self, request: web.Request) -> web.Response:
        await self.put(self.envd(request), request.query["path"], await request.read())
        return web.json_response([{"path": request.query["path"], "name": "", "type": "file"}])

    async def e2b_get(self, request: web.Request) -> web.Response:
        return await self.send_file(self.envd(request), request.query["path"])

    async def daytona_create(self, request: web.Request) -> web.Response:
        check(request.headers.get("Authorization"))
        asked = await request.json()
        assert asked["snapshot"] == "my-snapshot" and asked["networkBlockAll"] and asked["memory"] >= 1
        return web.json_response(self.daytona(await self.create(), "creating"))

    def daytona(self, name: str, state: str) -> dict[str, str]:
        return {"id": name, "state": state, "toolboxProxyUrl": f"{self.url}/toolbox"}

    async def daytona_state(self, request: web.Request) -> web.Response:
        check(request.headers.get("Authorization"))
        return web.json_response(self.daytona(self.box(request.match_info["name"]).name, "started"))

    async def daytona_port(self, request: web.Request) -> web.Response:
        port = request.match_info["port"]
        return web.json_response({"url": f"https://{port}-{TOKEN}.proxy.example", "token": TOKEN, "port": int(port)})

    async def daytona_execute(self, request: web.Request) -> web.Response:
        check(request.headers.get("Authorization"))
        asked = await request.json()
        done = await self.box(request.match_info["name"]).run(["bash", "-c", asked["command"]], seconds=600)
        return web.json_response({"exitCode": done.exit_code, "result": done.stdout + done.stderr})

    async def daytona_put(self, request: web.Request) -> web.Response:
        check(request.headers.get("Authorization"))
        path = ""
        async for part in await request.multipart():
            assert isinstance(part, BodyPartReader)
            if part.name == "files[0].path":
                path = await part.text()
            else:
                assert part.name == "files[0].file"
                await self.put(self.box(request.match_info["name"]), path, bytes(await part.read()))
        return web.Response()

    async def download(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"].startswith("Bearer ")
        return await self.send_file(self.box(request.match_info["name"]), request.query["path"])

    async def prime_create(self, request: web.Request) -> web.Response:
        check(request.headers.get("Authorization"))
        asked = await request.json()
        assert asked["docker_image"] == "python:3.12-slim" and asked["network_allowlist"] == [] and asked["vm"]
        return web.json_response({"id": await self.create(), "status": "PENDING"})

    async def prime_state(self, request: web.Request) -> web.Response:
        check(request.headers.get("Authorization"))
        return web.json_response({"id": self.box(request.match_info["name"]).name, "status": "RUNNING"})

    async def prime_auth(self, request: web.Request) -> web.Response:
        check(request.headers.get("Authorization"))
        name = request.match_info["name"]
        self._tokens[name] = self._tokens.get(name, 0) + 1
        given = {"gateway_url": f"{self.url}/gateway/", "user_ns": "ns", "job_id": name}
        return web.json_response({**given, "token": f"{TOKEN}-{self._tokens[name]}"})

    async def prime_start(self, request: web.Request) -> web.StreamResponse:
        if request.headers["Authorization"] != f"Bearer {TOKEN}-2":  # the first one has run out
            return web.json_response({"code": "unauthenticated", "message": "expired"}, status=401)
        return await self.stream(request, self.box(request.match_info["name"]))

    async def prime_put(self, request: web.Request) -> web.Response:
        async for part in await request.multipart():
            assert isinstance(part, BodyPartReader) and part.name == "file"
            data = bytes(await part.read())
            await self.put(self.box(request.match_info["name"]), request.query["path"], data)
        return web.json_response({"success": True, "path": request.query["path"], "size": len(data)})


def check(given: str | None, wanted: str = KEY) -> None:
    if (given or "").removeprefix("Bearer ") != wanted:
        raise web.HTTPUnauthorized(text="wrong key")


async def main() -> None:
    stand_in = StandIn()
    runner = web.AppRunner(stand_in.app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stand_in.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    print(json.dumps({"url": stand_in.url, "pid": os.getpid()}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
