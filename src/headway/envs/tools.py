"""Tools: typed Python functions that the model may call, described by their hints and docstring, called in threads."""

import asyncio
import inspect
import json
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, overload

import msgspec

from headway.base.errors import UsageError
from headway.core.messages import Message, Tool, ToolCall
from headway.envs.threads import call_in_thread

INJECTED = ("self", "state", "task")
"""Parameters that the environment fills in; the model neither sees nor sets them."""

_SIMPLE: dict[object, str] = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
_ARGUMENT = re.compile(r"^\s*(\w+)(?:\s*\([^)]*\))?\s*:\s*(.+)$")


@dataclass(frozen=True)
class ToolFunction:
    """A function, its description, and the types that a call's arguments are converted to."""

    tool: Tool
    function: Callable[..., Any]
    types: dict[str, Any]
    injected: tuple[str, ...]

    def arguments(self, text: str) -> dict[str, Any]:
        """Read a call's JSON as keyword arguments. Raises ValueError with a reason that helps the model."""
        try:
            given = msgspec.json.decode(text or "{}")
        except msgspec.DecodeError as error:
            raise ValueError(f"arguments are not JSON: {error}") from error
        if not isinstance(given, dict):
            raise ValueError("arguments must be a JSON object")
        unknown = sorted(set(given) - set(self.types))
        missing = [name for name in self.tool.parameters.get("required", []) if name not in given]
        if unknown:
            raise ValueError(
                f"unknown argument {unknown[0]!r}; {self.tool.name} takes {', '.join(self.types) or 'none'}"
            )
        if missing:
            raise ValueError(f"missing argument {missing[0]!r}")
        try:
            return {name: msgspec.convert(value, self.types[name], strict=False) for name, value in given.items()}
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error


@overload
def tool(function: Callable[..., Any]) -> Callable[..., Any]: ...


@overload
def tool(*, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def tool(function: Callable[..., Any] | None = None, *, name: str | None = None) -> Any:
    """Mark a method of an environment as a tool. `@tool(name="open")` gives it another name than the method's."""
    if function is None:
        return lambda marked: _mark(marked, name)
    return _mark(function, name)


def _mark(function: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    """Put the marks on the function itself."""
    vars(function).update(_headway_tool=True, _headway_tool_name=name or function.__name__)
    return function


def is_tool(value: object) -> bool:
    return getattr(value, "_headway_tool", False) is True


def describe(value: Tool | ToolFunction | Callable[..., Any]) -> Tool:
    """Describe `value` to the model."""
    if isinstance(value, Tool):
        return value
    return value.tool if isinstance(value, ToolFunction) else from_function(value).tool


def from_function(function: Callable[..., Any]) -> ToolFunction:
    """Make `function` a tool. Raises UsageError where a parameter has no type that JSON can carry."""
    name = getattr(function, "__name__", type(function).__name__)
    name = str(getattr(function, "_headway_tool_name", name))
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise UsageError(f"tool {name}: its types can't be resolved: {error}") from error
    summary, explained = _docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required, types_, injected = [], {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in INJECTED:
            injected.append(parameter.name)
            continue
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UsageError(f"tool {name}: parameter {parameter.name!r} needs a type, such as `{parameter.name}: str`")
        types_[parameter.name] = hints[parameter.name]
        schema = _schema(hints[parameter.name], f"tool {name}: parameter {parameter.name!r}")
        if parameter.name in explained:
            schema["description"] = explained[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return ToolFunction(Tool(name, summary, parameters), function, types_, tuple(injected))


class Toolbox:
    """Tools by name, called in threads that may hang. What goes wrong in a call is told to the model.

    `timeout` bounds one call in seconds, `max_output` its result in characters.
    """

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
        """Run `call`; its result, or what went wrong, is the tool's message."""
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
        return _as_text(value)


def cut(text: str, limit: int) -> str:
    """Leave out the middle of a text that is longer than `limit`."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def _schema(kind: Any, where: str) -> dict[str, Any]:
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"type": _SIMPLE.get(type(arguments[0]), "string"), "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        options = [option for option in arguments if option is not type(None)]
        if len(options) == 1:
            return _schema(options[0], where)
        return {"anyOf": [_schema(option, where) for option in options]}
    if kind is list or origin in (list, tuple, Sequence):
        return {"type": "array", "items": _schema(arguments[0], where) if arguments else {}}
    if origin is dict:
        return {"type": "object"}
    if kind is Any:
        return {}
    raise UsageError(f"{where} has type {kind!r}; use str, int, float, bool, list, dict or Literal")


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into the description, and those of parameters below `Args:`."""
    summary, _, rest = text.partition("\nArgs:")
    explained: dict[str, str] = {}
    for line in rest.splitlines():
        if match := _ARGUMENT.match(line):
            explained[match.group(1)] = match.group(2).strip()
    return " ".join(summary.split()), explained
