"""Chat formats of the `renderers` package (an optional extra) behind our own interface."""

import json
from importlib.util import find_spec
from typing import Any

from tokenizers import Tokenizer

from headway.base.errors import HeadwayError
from headway.base.extras import install_command
from headway.core.messages import Message, ToolCall
from headway.rendering.base import History, Rendered, Segment, TokenIds, TokenizerRenderer, Tools, template_message
from headway.rendering.replies import call_id

FORMATS = {
    "qwen3_5": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "glm_moe_dsa": "glm-5",
    "deepseek_v3": "deepseek-v3",
    "kimi_k2": "kimi-k2",
    "nemotron_h": "nemotron-3",
}
"""Formats by `model_type` of families that `headway.models` does not have: another engine serves their models."""


def available() -> bool:
    return find_spec("renderers") is not None


class ExternalTokenizer:
    """The part of a Hugging Face tokenizer's interface that the package uses, over `tokenizers` alone."""

    unk_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, name: str, eos_token_id: int | None) -> None:
        self.name_or_path = name
        self.eos_token_id = eos_token_id
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = False, **_: object) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: object) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]

    def __call__(self, text: str, add_special_tokens: bool = False, **_: object) -> dict[str, Any]:
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}


class ExternalRenderer(TokenizerRenderer):
    """The format called `format` in the `renderers` package, over a checkpoint's tokenizer."""

    call_mark = None

    def __init__(self, tokenizer: Tokenizer, format: str, *, name: str = "", eos_token_id: int | None = None) -> None:
        if not available():
            raise HeadwayError(f'renderer "{format}" needs a package: {install_command("renderers")}')
        import renderers

        try:
            config = renderers.config_from_name(format)
            self._renderer = renderers.create_renderer(ExternalTokenizer(tokenizer, name, eos_token_id), config)
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise HeadwayError(f'renderer "{format}" does not fit this tokenizer: {reason}') from error
        super().__init__(tokenizer, self._renderer.get_stop_token_ids())
        self._opening: list[int] | None = None

    def render(self, messages: History, tools: Tools = (), *, generation_prompt: bool = False) -> Rendered:
        made = self._renderer.render(
            [template_message(message) for message in messages],
            tools=_tools(tools),
            add_generation_prompt=generation_prompt,
        )
        return Rendered(_segments(made, 0))

    def extend(
        self, token_ids: TokenIds, new_messages: History, tools: Tools = (), *, reply: int = 0, history: History = ()
    ) -> Rendered | None:
        if not reply or reply >= len(token_ids):
            return None
        prompt, completion = list(token_ids[:-reply]), list(token_ids[-reply:])
        try:
            made = self._renderer.bridge_to_next_turn(
                prompt, completion, [template_message(message) for message in new_messages], tools=_tools(tools)
            )
        except Exception:  # nothing is proven about tokens that a format does not expect
            return None
        if made is None or made.token_ids[: len(token_ids)] != [*prompt, *completion]:
            return None
        return Rendered(_segments(made, len(token_ids)))

    def parse(self, token_ids: TokenIds, tools: Tools = ()) -> Message:
        try:
            made = self._renderer.parse_response(
                list(token_ids), tools=_tools(tools), prompt_ids=self._generation_prompt()
            )
        except Exception:  # parsers of thirty formats, on whatever a model may sample
            return Message("assistant", self.decode(token_ids))
        content = made.content or ""
        calls: list[ToolCall] = []
        for call in made.tool_calls:
            if str(call.status) == "ok" and call.name:
                text = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments or {})
                calls.append(ToolCall(call.id or call_id(len(calls)), call.name, text))
            elif call.raw and call.raw not in content:
                content += call.raw
        return Message("assistant", content, tuple(calls), reasoning=made.reasoning_content)

    def _generation_prompt(self) -> list[int]:
        """The tokens that a reply follows; some formats open the reasoning there already."""
        if self._opening is None:
            last = self.render([Message("user", "ask")], generation_prompt=True).segments[-1]
            self._opening = last.token_ids if last.message is None else []
        return self._opening


def _tools(tools: Tools) -> list[dict[str, Any]] | None:
    return [tool.to_openai() for tool in tools] or None


def _segments(made: Any, start: int) -> list[Segment]:
    """Group the tokens from `start` on by the message that they belong to."""
    spoken = made.sampled_mask or [False] * len(made.token_ids)
    segments: list[Segment] = []
    owner: int | None = -2
    for token, index, said in zip(made.token_ids[start:], made.message_indices[start:], spoken[start:], strict=True):
        if index != owner:
            segments.append(Segment([], None if index < 0 else index, []))
            owner = index
        segments[-1].token_ids.append(token)
        segments[-1].content.append(bool(said))
    return segments
