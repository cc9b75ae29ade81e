"""Checkpoints' chat templates: Jinja in a sandbox, with the few extras that templates of this field expect."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headway.core.errors import HeadwayError
from headway.core.messages import Message, Tool
from headway.rendering.base import template_message


class TemplateError(HeadwayError):
    """The template refused a conversation."""


def compile_template(source: str) -> Callable[..., str]:
    """Compile to a function from template variables to text. Raises HeadwayError where `source` is not a template."""

    def refuse(message: str) -> NoReturn:
        raise TemplateError(f"the chat template refuses this conversation: {message}")

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source).render
    except jinja2.TemplateError as error:
        raise HeadwayError(f"the checkpoint's chat template can't be read: {error}") from error


class ChatTemplate:
    """A checkpoint's template: `text` renders a whole conversation. Raises TemplateError where the template refuses."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._render = compile_template(source)
        self._special_tokens = special_tokens

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = False) -> str:
        try:
            return self._render(
                messages=[template_message(message) for message in messages],
                tools=[tool.to_openai() for tool in tools] or None,
                add_generation_prompt=generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise TemplateError(f"the chat template fails on this conversation: {error}") from error
