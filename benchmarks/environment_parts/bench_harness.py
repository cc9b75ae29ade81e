"""A chat loop inside the process, for verifiers: the fastest path that it documents."""

import contextlib
import json
from typing import Any, cast

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp


class BenchHarnessConfig(vf.HarnessConfig):
    pass


class BenchHarness(vf.Harness[BenchHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack, AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
            with contextlib.suppress(APIStatusError):  # a turn that a stop condition refuses ends the episode
                while True:
                    extra = {"tools": tools} if tools else {}
                    reply = await client.chat.completions.create(model=ctx.model, messages=cast(Any, messages), **extra)
                    said = reply.choices[0].message
                    messages.append(said.model_dump(exclude_none=True))
                    if not said.tool_calls:
                        break
                    for call in cast(Any, said.tool_calls):
                        arguments = json.loads(call.function.arguments or "{}")
                        result = await call_mcp(connected, dispatch, call.function.name, arguments)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["BenchHarness"]
