"""An agent that talks for many turns: `python agent.py TURNS API`, where API is "chat" or "responses".

With "chat" it sends the whole conversation each time, as that API wants it; with "responses" only what is new.
"""

import asyncio
import os
import sys
from typing import Any

import aiohttp

PARAMETERS = {"type": "object", "properties": {"page": {"type": "integer"}}, "required": ["page"]}
LOOK = {"name": "look", "description": "Read a page.", "parameters": PARAMETERS}


def page(number: int) -> str:
    """A tool's output of 183 bytes."""
    return f"page {number:04d}: " + "lorem ipsum " * 14 + "fin."


class Agent:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._url = os.environ["OPENAI_BASE_URL"]

    async def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(f"{self._url}/{route}", json=body) as reply:
            reply.raise_for_status()
            answer: dict[str, Any] = await reply.json()
            return answer

    async def chat(self, turns: int) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Read all pages."}]
        for turn in range(turns):
            tools = [{"type": "function", "function": LOOK}]
            reply = await self._post("chat/completions", {"model": "policy", "messages": messages, "tools": tools})
            message = reply["choices"][0]["message"]
            call = message["tool_calls"][0]
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": page(turn)}]

    async def responses(self, turns: int) -> None:
        new: list[dict[str, Any]] = [{"role": "user", "content": "Read all pages."}]
        body: dict[str, Any] = {"model": "policy", "tools": [{"type": "function", **LOOK}]}
        for turn in range(turns):
            reply = await self._post("responses", {**body, "input": new})
            call = next(item for item in reply["output"] if item["type"] == "function_call")
            new = [{"type": "function_call_output", "call_id": call["call_id"], "output": page(turn)}]
            body["previous_response_id"] = reply["id"]


async def main(turns: int, api: str) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await getattr(Agent(session), api)(turns)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
