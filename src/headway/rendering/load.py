"""Choose the renderer of a checkpoint: by name, or the best one that provably renders as its template does."""

import json
import logging
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headway.base.errors import HeadwayError, UsageError
from headway.base.imports import installed, make_object
from headway.core.messages import Message, Tool, ToolCall
from headway.models.images.processor import has_processor
from headway.models.registry import families, find_family, load_config, load_family
from headway.models.tiny_tokenizer import TEMPLATE_MARK
from headway.models.vision.config import VisionConfig
from headway.models.vision.family import VisionFamily
from headway.rendering.base import Renderer
from headway.rendering.chatml import STYLES, ChatMLRenderer, with_default_system
from headway.rendering.external import FORMATS, ExternalRenderer, available
from headway.rendering.template import ChatTemplate, TemplateError, TemplateRenderer
from headway.rendering.tokenizer import load_chat_template, load_tokenizer, load_tokenizer_config, special_token
from headway.rendering.vision import seeing

logger = logging.getLogger(__name__)

GROUP = "headway.renderers"
"""Entry-point group of packages that bring renderers: `name = "module:Name"`."""

_TOOL = Tool("look", "Look up.", {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]})
_CALL = ToolCall("call_0", "look", '{"key": "x"}')


def load_renderer(folder: Path, name: str = "auto", family: str | None = None) -> Renderer:
    """Load the renderer `name` for the checkpoint in `folder`, after registering its `family` (`model.family`).

    `auto` takes, in this order: native ChatML in the dialect that agrees with the checkpoint's chat template, the
    `chat_format` of the model's family where it agrees with it, the template itself. `template` insists on the last.
    That of a model that sees also takes images, where the folder has an image processor.
    """
    if family is not None:
        load_family(family)
    folder = Path(folder)
    config = _vision_config(folder)
    if config is None:
        return _load_for_texts(folder, name)
    found = find_family(config.family)
    assert isinstance(found, VisionFamily)
    image = found.image_text
    # Text around an image is tokenized with its neighbours, so it must be there before anything is.
    replaced = (image.mark, image.around + image.mark + image.around)
    renderer = _load_for_texts(folder, "template" if name == "auto" and image.around else name, replaced)
    return seeing(renderer, folder, config, image)


def _vision_config(folder: Path) -> VisionConfig | None:
    """The config of a model that sees; None where it does not, or nothing makes its patches."""
    if "vision_config" not in _config(folder) or not has_processor(folder):
        return None
    config = load_config(folder)
    return config if isinstance(config, VisionConfig) else None


def _load_for_texts(folder: Path, name: str, replaced: tuple[str, str] = ("", "")) -> Renderer:
    tokenizer = load_tokenizer(folder)
    if name in STYLES:
        return ChatMLRenderer(tokenizer, STYLES[name])
    if ":" in name or name in installed(GROUP):
        made: Renderer = make_object(name, {"tokenizer": tokenizer}, "model.renderer", GROUP)
        methods = ("stop_token_ids", "render", "extend", "parse", "decode", "encode")
        if missing := [method for method in methods if not hasattr(made, method)]:
            raise UsageError(
                f'model.renderer "{name}": {type(made).__name__} has no {", ".join(missing)}; '
                "subclass one of headway.rendering, or write all of headway.rendering.base.Renderer"
            )
        return made
    if name not in ("auto", "template"):
        return ExternalRenderer(tokenizer, name, name=_checkpoint_name(folder), eos_token_id=_eos(folder, tokenizer))
    source = load_chat_template(folder)
    ours = source is None or source.lstrip().startswith(TEMPLATE_MARK)
    if name == "auto" and ours and tokenizer.token_to_id("<|im_start|>") is not None:
        if source is None:
            logger.warning(
                "%s has no chat template; ChatML is used, since its vocabulary has <|im_start|>. Set model.renderer if "
                "the model was trained on another format",
                folder,
            )
        return ChatMLRenderer(tokenizer)
    if source is None:
        raise HeadwayError(f"{folder} has no chat template; set model.renderer, for example to chatml")
    fallback = TemplateRenderer(tokenizer, _template(folder, source, replaced), _stops(folder, tokenizer))
    if name == "template":
        return fallback
    candidates: Iterator[Renderer] = chain(_native(tokenizer, fallback), _external(folder, tokenizer))
    return next((renderer for renderer in candidates if agrees(renderer, fallback)), fallback)


def agrees(renderer: Renderer, template: TemplateRenderer) -> bool:
    """Compare `renderer` with the template on conversations of every kind that the template tells apart."""
    ask, answer, more = Message("user", "ask"), Message("assistant", "answer"), Message("user", "more")
    thought = Message("assistant", "answer", reasoning="thought")
    call = Message("assistant", "", (_CALL,))
    result = Message("tool", "found", tool_call_id="call_0")
    probes = [[ask], [Message("system", "rules"), ask], [ask, answer, more], [Message("system", "rules"), ask, answer]]
    if _tells_apart(template, [ask, answer, more, thought], [ask, answer, more, answer]):
        probes += [[ask, thought, more], [ask, answer, more, thought]]
    told = (_TOOL,) if _tells_apart(template, [ask], [ask], (_TOOL,)) else ()
    if told:
        probes += [[ask, call, result], [Message("system", "rules"), ask, call, result, result]]
    try:
        for messages in probes:
            prompt = messages[-1].role != "assistant"
            ours = renderer.render(messages, told, generation_prompt=prompt).token_ids
            if ours != template.render(messages, told, generation_prompt=prompt).token_ids:
                return False
    except (TemplateError, ValueError, AssertionError):
        return False
    return True


def _tells_apart(
    template: TemplateRenderer, some: list[Message], others: list[Message], tools: tuple[Tool, ...] = ()
) -> bool:
    try:
        return template.render(some, tools).token_ids != template.render(others).token_ids
    except TemplateError:
        return False


def _native(tokenizer: Tokenizer, template: TemplateRenderer) -> Iterator[ChatMLRenderer]:
    if tokenizer.token_to_id("<|im_start|>") is None or tokenizer.token_to_id("<|im_end|>") is None:
        return
    text = template.decode(template.render([Message("user", "ask")]).token_ids)
    found = re.match(r"<\|im_start\|>system\n(.*?)<\|im_end\|>\n", text, re.DOTALL)
    for style in STYLES.values():
        yield ChatMLRenderer(tokenizer, with_default_system(style, found.group(1) if found else None))


def _external(folder: Path, tokenizer: Tokenizer) -> Iterator[ExternalRenderer]:
    own = {family.model_type: family.chat_format for family in families()}
    format = (FORMATS | own).get(_config(folder).get("model_type", ""))
    if format is None or not available():
        return
    try:
        yield ExternalRenderer(tokenizer, format, name=_checkpoint_name(folder), eos_token_id=_eos(folder, tokenizer))
    except HeadwayError:
        return


def _template(folder: Path, source: str, replaced: tuple[str, str]) -> ChatTemplate:
    config = load_tokenizer_config(folder)
    names = [key for key in config if key.endswith("_token")]
    special = {name: text for name in names if (text := special_token(config, name)) is not None}
    return ChatTemplate(source, special, replaced)


def _stops(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """Collect end-of-turn tokens: the tokenizer's own, and those of the generation settings."""
    found = [token for token in (_eos(folder, tokenizer),) if token is not None]
    for name in ("generation_config.json", "config.json"):
        ids = _config(folder, name).get("eos_token_id")
        found += [ids] if isinstance(ids, int) else ids or []
    return list(dict.fromkeys(found))


def _eos(folder: Path, tokenizer: Tokenizer) -> int | None:
    text = special_token(load_tokenizer_config(folder), "eos_token")
    return tokenizer.token_to_id(text) if text else None


def _checkpoint_name(folder: Path) -> str:
    return str(_config(folder).get("_name_or_path") or folder)


def _config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    try:
        config = json.loads((folder / name).read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
