"""JSON schemas as grammars, which tell token by token how a reply may go on."""

import asyncio
import threading
from collections import OrderedDict
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.errors import HeadwayError
from headway.base.extras import install_command
from headway.core.openai.requests import RequestError
from headway.models.configs.config import ModelConfig
from headway.rendering.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_KEPT = 128
"""Compiled grammars that are kept for later requests."""


class Grammars:
    """Grammars of a checkpoint's tokens by their schemas, compiled in a thread; the latest are kept.

    A grammar is a matcher at its beginning, of which every reply gets a copy.
    """

    def __init__(self, folder: Path | None, config: ModelConfig) -> None:
        self._folder, self._config = folder, config
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    async def compile(self, schema: str) -> "LLMatcher":
        """The grammar of JSON that satisfies `schema`. Raises RequestError where there is none."""
        known = self._kept.get(schema)
        if known is None:
            known = await asyncio.to_thread(self._compile, schema)
            self._kept[schema] = known
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(schema)
        return known

    def _compile(self, schema: str) -> "LLMatcher":
        if find_spec("llguidance") is None:
            message = f"response_format needs a package where the engine runs: {install_command('guided')}"
            raise RequestError(message, "response_format")
        from llguidance import LLMatcher

        try:
            with self._lock:
                tokenizer = self._tokenizer
        except (HeadwayError, ValueError) as error:
            raise RequestError(f"this model's tokens can't be guided: {error}", "response_format") from None
        # Values in one line, with a space or none after commas and colons: where any white space may stand, a model
        # can go on with it for ever.
        layout: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
        layout["lenient"] = False
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=layout)
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
        except ValueError as error:
            raise _refused(str(error)) from None
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return matcher

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        if self._folder is None:
            raise ValueError("the engine was started without a tokenizer")
        text = load_tokenizer(self._folder).to_str()
        eos = next(iter(self._config.eos_ids), None)
        return LLTokenizer(text, n_vocab=self._config.vocab_size, eos_token=eos)


def _refused(reason: str) -> RequestError:
    return RequestError(f"response_format: this schema is not supported: {reason.splitlines()[0]}", "response_format")
