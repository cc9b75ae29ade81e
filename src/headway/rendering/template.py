"""The fallback: a checkpoint's own chat template; a conversation is extended only where its text proves to append."""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from headway.base.errors import HeadwayError
from headway.core.messages import Message
from headway.rendering.base import History, Rendered, Segment, TokenIds, TokenizerRenderer, Tools, template_message
from headway.rendering.replies import parse_reply


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
    """A checkpoint's template: `text` renders a whole conversation. Raises TemplateError where the template refuses.
    `replaced` are two texts, the first of which becomes the second in what the template returns."""

    def __init__(self, source: str, special_tokens: dict[str, str], replaced: tuple[str, str] = ("", "")) -> None:
        self._render = compile_template(source)
        self._special_tokens = special_tokens
        self._replaced = replaced

    def text(self, messages: History, tools: Tools = (), *, generation_prompt: bool = False) -> str:
        try:
            text = self._render(
                messages=[template_message(message) for message in messages],
                tools=[tool.to_openai() for tool in tools] or None,
                add_generation_prompt=generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise TemplateError(f"the chat template fails on this conversation: {error}") from error
        return text.replace(*self._replaced) if self._replaced[0] else text


class TemplateRenderer(TokenizerRenderer):
    """Renders with any `template`. `stop_token_ids` end a reply."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, stop_token_ids: TokenIds) -> None:
        super().__init__(tokenizer, stop_token_ids)
        self._template = template
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}

    def render(self, messages: History, tools: Tools = (), *, generation_prompt: bool = False) -> Rendered:
        text = self._template.text(messages, tools, generation_prompt=generation_prompt)
        # A batch of one lets other threads run meanwhile.
        encoding = self.tokenizer.encode_batch([text], add_special_tokens=False)[0]
        starts = [start for start, _ in encoding.offsets]
        content = [False] * len(starts)
        cuts = self._cuts(messages, 0, tools, text)
        for index, message in enumerate(messages):
            if message.role == "assistant":
                begin, stop = self._sampled(messages, index, tools, text, (cuts[index], cuts[index + 1]))
                for place, start in enumerate(starts):
                    content[place] |= begin <= start < stop
        return Rendered(_split(encoding.ids, starts, content, cuts))

    def extend(
        self, token_ids: TokenIds, new_messages: History, tools: Tools = (), *, reply: int = 0, history: History = ()
    ) -> Rendered | None:
        """Appending is proven where the template's text for everything begins with the text of `token_ids`, and
        the two parts meet at a special token, across which no tokenizer merges."""
        if not history or not new_messages or not token_ids:
            return None
        try:
            text = self._template.text([*history, *new_messages], tools, generation_prompt=True)
        except TemplateError:
            return None
        before = self.decode(token_ids)
        if not text.startswith(before):
            return None
        added = self._appended(token_ids[-1], text[len(before) :])
        if added is None:
            return None
        ids, starts = added
        cuts = [cut - len(before) for cut in self._cuts([*history, *new_messages], len(history), tools, text)]
        return Rendered(_split(ids, starts, [False] * len(ids), cuts))

    def parse(self, token_ids: TokenIds, tools: Tools = ()) -> Message:
        return parse_reply(self._reply_text(token_ids))

    def _appended(self, last: int, text: str) -> tuple[list[int], list[int]] | None:
        """Tokenize `text` as it follows token `last`: tokens and where each begins. None if they could merge."""
        lead = self.decode([last]) if last in self._special else ""
        encoding = self.tokenizer.encode(lead + text, add_special_tokens=False)
        ids, starts = encoding.ids, [start - len(lead) for start, _ in encoding.offsets]
        if lead:
            return (ids[1:], starts[1:]) if ids[:1] == [last] else None
        return (ids, starts) if ids and ids[0] in self._special else None

    def _cuts(self, messages: History, first: int, tools: Tools, text: str) -> list[int]:
        """Find where message `first` begins in `text` and where each from there on ends; the same offset if unknown."""
        cuts = [0 if first == 0 else self._end_of(messages[:first], tools, text, 0)]
        for index in range(first, len(messages)):
            cuts.append(self._end_of(messages[: index + 1], tools, text, cuts[-1]))
        return cuts

    def _end_of(self, messages: History, tools: Tools, text: str, least: int) -> int:
        try:
            part = self._template.text(messages, tools)
        except TemplateError:
            return least
        return len(part) if len(part) >= least and text.startswith(part) else least

    def _sampled(
        self, messages: History, index: int, tools: Tools, text: str, span: tuple[int, int]
    ) -> tuple[int, int]:
        """Find the part of an assistant's message that the model would have sampled, its end-of-turn token included."""
        begin, end = span
        try:
            prompt = self._template.text(messages[:index], tools, generation_prompt=True)
        except TemplateError:
            prompt = ""
        if text.startswith(prompt) and begin <= len(prompt) <= end:
            begin = len(prompt)
        marks = [self.decode([token]) for token in self._stops]
        ends = [found + len(mark) for mark in marks if (found := text.rfind(mark, begin, end)) >= 0]
        return begin, max(ends, default=end)


def _split(ids: list[int], starts: list[int], content: list[bool], cuts: Sequence[int]) -> list[Segment]:
    """Split tokens into segments of messages, which lie between `cuts`; tokens before and after belong to none."""
    segments, place = [], 0
    for index in range(len(cuts) + 1):
        begin = place
        while place < len(ids) and (index == len(cuts) or starts[place] < cuts[index]):
            place += 1
        if place > begin:
            owner = index - 1 if 0 < index < len(cuts) else None
            segments.append(Segment(ids[begin:place], owner, content[begin:place]))
    return segments
