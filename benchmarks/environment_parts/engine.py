"""An engine that answers at once, so that only the cost of running episodes is left: `python engine.py FOLDER`.

Prints its port. Serves the tiny tokenizer's replies to the two tasks of the benchmark.
"""

import asyncio
import re
import sys
from pathlib import Path

import msgspec
from aiohttp import web

from headway.core.protocol import GenerateChoice, GenerateRequest, GenerateResponse, Logprobs, TokenLogprob, Usage
from headway.rendering.tokenizer import load_tokenizer


class InstantEngine:
    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(folder)
        end = self._tokenizer.token_to_id("<|im_end|>")
        assert end is not None
        self._end = end

    def reply(self, prompt: str) -> str:
        if sum_ := re.search(r"Add (\d+) and (\d+)", prompt):
            results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt)
            if results:
                return f"The answer is {results[-1]}"
            name = "calc_add" if "calc_add" in prompt else "add"
            a, b = sum_.groups()
            return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
        return str(re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)[-1][::-1])

    async def generate(self, http: web.Request) -> web.Response:
        request = msgspec.json.decode(await http.read(), type=GenerateRequest)
        text = self.reply(self._tokenizer.decode(request.token_ids, skip_special_tokens=False))
        ids = [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end]
        logprobs = Logprobs([TokenLogprob(f"token_id:{token}", token, -0.25) for token in ids])
        choice = GenerateChoice(0, ids, "stop", logprobs, [(0, len(ids))])
        usage = Usage(len(request.token_ids), len(ids), len(request.token_ids) + len(ids))
        body = msgspec.json.encode(GenerateResponse("request", [choice], usage))
        return web.Response(body=body, content_type="application/json")

    async def models(self, http: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": "policy", "object": "model", "max_model_len": 4096}]}
        )


async def main(folder: Path) -> None:
    engine = InstantEngine(folder)
    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", engine.generate), web.get("/v1/models", engine.models)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
