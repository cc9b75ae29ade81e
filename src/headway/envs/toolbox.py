"""Calling tools: in threads that may hang, with time limits, output cut to size, errors told to the model."""

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

from headway.core.errors import UsageError
from headway.core.messages import Message, ToolCall
from headway.envs.threads import call_in_thread
from headway.envs.tools import ToolFunction, from_function


class Toolbox:
    """Tools by name. `timeout` bounds one call in seconds, `max_output` its result in characters."""

    def __init__(self, functions: Sequence[Callable[..., Any]], timeout: float = 30.0, max_output: int = 8192) -> None:
        """Raises UsageError where a function can't be described to a model."""
        made = [from_function(function) for function in functions]
        self.functions: dict[str, ToolFunction] = {item.tool.name: item for item in made}
        self.tools = [item.tool for item in made]
        self.timeout = timeout
        self.max_output = max_output

    def check(self) -> None:
        """Raise UsageError where there is nothing to call."""
        if not self.functions:
            raise UsageError("the environment has no tools: mark methods with @tool, or list functions in `tools`")

    async def call(self, call: ToolCall, state: object) -> Message:
        """The result of `call` as a tool's message; what went wrong is told in it."""
        content = cut(await self._result(call, state), self.max_output)
        return Message("tool", content, tool_call_id=call.id, name=call.name)

    async def _result(self, call: ToolCall, state: object) -> str:
        chosen = self.functions.get(call.name)
        if chosen is None:
            return f"error: there is no tool {call.name!r}; the tools are {', '.join(self.functions)}"
        try:
            arguments = chosen.arguments(call.arguments)
        except ValueError as error:
            return f"error: {error}"
        if "state" in chosen.injected:
            arguments["state"] = state
        if "task" in chosen.injected:
            arguments["task"] = getattr(state, "task", None)
        try:
            if inspect.iscoroutinefunction(chosen.function):
                async with asyncio.timeout(self.timeout):
                    value = await chosen.function(**arguments)
            else:
                value = await call_in_thread(lambda: chosen.function(**arguments), self.timeout)
        except TimeoutError:
            return f"error: {call.name} took longer than {self.timeout:g} s"
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"
        return _text(value)


def cut(text: str, limit: int) -> str:
    """`text`, its middle left out where it is longer than `limit`."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
