"""The one file that knows the types of `verifiers`: its env server, run as a program, and the client that calls it.

The server runs in a process of its own (`python -m headway.envs.adapters.verifiers_bridge`). It reads its
configuration as one line of JSON from stdin, prints its address, and ends when stdin closes, so that it never
outlives whoever started it.

The package's stock harnesses start a program through `uv` for each rollout. `ChatLoop` is the same conversation
inside the server, without network or installs; it is the default, and any other harness can be named instead.
"""

import contextlib
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.serve import EnvClient, serve_env

from headway.envs.policy import EpisodeFailure

# A harness is found by the name of a top-level module that exports it, and nothing else, in `__all__`.
HARNESS = "headway_chat_loop"
sys.modules.setdefault(HARNESS, sys.modules[__name__])
__all__ = ["ChatLoop"]


class ChatLoopConfig(vf.HarnessConfig):  # type: ignore[misc]  # the package is not type-checked here
    pass


class ChatLoop(vf.Harness[ChatLoopConfig]):  # type: ignore[misc]  # the package is not type-checked here
    """Ask the model, run the tools it calls, until it calls none or a stop condition refuses the next turn."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> Any:
        messages = self._opening(data)
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with (
            contextlib.AsyncExitStack() as stack,
            AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client,
        ):
            tools, routes, connections = await connect_mcp(servers, stack)
            options = {"tools": tools} if tools else {}
            while True:
                try:
                    reply = await client.chat.completions.create(model=ctx.model, messages=messages, **options)
                except APIStatusError:
                    if trace.stop_condition is None:
                        raise
                    break
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    messages.append(await self._answer(call, routes, connections))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    def _opening(self, data: Any) -> list[Any]:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(message) for message in prompt or ())]

    async def _answer(self, call: Any, routes: Any, connections: Any) -> dict[str, Any]:
        try:
            arguments = json.loads(call.function.arguments or "{}")
            content = await call_mcp(connections, routes, call.function.name, arguments)
        except Exception as error:  # whatever a tool does wrong is for the model to read
            content = f"error: {error}"
        return {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": content}


def load_tasks(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of every task of the configured taskset, as JSON. Raises ValueError on a config that does not fit."""
    taskset = vf.load_taskset(vf.resolve_env_config(config).taskset)
    return [task.data.model_dump(mode="json") for task in taskset]


def taskset_module(config: dict[str, Any]) -> str:
    """The name of the module that the configured taskset is in."""
    return type(vf.load_taskset(vf.resolve_env_config(config).taskset)).__module__


@dataclass(frozen=True)
class Outcome:
    """The rewards of one agent of a finished episode. `session` is the id that its calls carried."""

    session: str
    agent: str
    trainable: bool
    rewards: dict[str, tuple[float, float]]
    metrics: dict[str, float]


class Client:
    """Talks to one env server."""

    def __init__(self, address: str) -> None:
        self._client = EnvClient(address)

    async def run(self, task: dict[str, Any], base_url: str) -> list[Outcome]:
        """One episode against the chat API at `base_url`. Raises EpisodeFailure with what the package reports."""
        model = vf.EvalClientConfig(base_url=base_url, api_key_var="HEADWAY_NO_KEY")
        try:
            episode = await self._client.run(model, "policy", vf.SamplingConfig(), task)
        except RuntimeError as error:
            raise EpisodeFailure("environment", f"verifiers: {error}") from error
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.ok:
            reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode did not complete"
            raise EpisodeFailure("environment", f"verifiers: {reason}")
        return [
            Outcome(
                trace.id,
                trace.agent.name,
                trace.agent.trainable,
                {name: (float(part.score), float(part.weight)) for name, part in trace.rewards.items()},
                {name: float(value) for name, value in trace.metrics.items()},
            )
            for trace in episode.traces
        ]

    async def close(self) -> None:
        await self._client.close()


@dataclass(frozen=True)
class _ParentPipe:
    """The pipe that `serve_env` watches: it closes when the parent process has ended."""

    handle: int

    def recv(self) -> None:
        while os.read(self.handle, 4096):
            pass


@dataclass(frozen=True)
class _Report:
    """The queue in which `serve_env` puts the address that it listens at."""

    handle: int

    def put(self, address: str) -> None:
        os.write(self.handle, f"address {address}\n".encode())
        os.close(self.handle)


def main() -> None:
    config = json.loads(sys.stdin.readline())
    # Both pipes are kept by this process alone: copies are not inherited by what a taskset starts, which finds
    # nothing to read at its stdin, and prints into the log.
    parent, report = _ParentPipe(os.dup(0)), _Report(os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    serve_env(
        max_workers=1,
        address="tcp://127.0.0.1:0",
        address_queue=report,
        death_pipe=parent,
        config_data=config,
    )


if __name__ == "__main__":
    main()
