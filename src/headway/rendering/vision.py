"""Rendering for models that see: images become runs of placeholder tokens, as many as the model makes features of
each, where Hugging Face's processors have them."""

from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import msgspec

from headway.base.errors import HeadwayError
from headway.core.images import MOST_IMAGES, ImageUse, MessageImage
from headway.core.messages import Message, count_images
from headway.models.images.processor import load_processor
from headway.models.images.reader import ImageReader, image_reader
from headway.models.vision.config import VisionConfig
from headway.models.vision.family import ImageText
from headway.models.vision.places import expand_placeholders, feature_count
from headway.rendering.base import History, Rendered, Renderer, Segment, TokenIds, Tools


class VisionRenderer:
    """Renders with `inner`, a renderer of texts, and puts placeholders where messages hold images. `text` is what
    stands for an image in texts."""

    sees = True

    def __init__(self, inner: Renderer, reader: ImageReader, placeholder: int, text: ImageText) -> None:
        self.inner = inner
        self.reader = reader
        self._text = text
        self._placeholder = placeholder

    def __getattr__(self, name: str) -> Any:
        """Everything else is that of texts."""
        return getattr(self.inner, name)

    @property
    def stop_token_ids(self) -> list[int]:
        return self.inner.stop_token_ids

    def parse(self, token_ids: TokenIds, tools: Tools = ()) -> Message:
        return self.inner.parse(token_ids, tools)

    def decode(self, token_ids: TokenIds) -> str:
        return self.inner.decode(token_ids)

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)

    def read_images(self, messages: History) -> None:
        """Decode all images, so that rendering finds them. Raises ValueError, with the reason, for one that can't be
        taken, and for too many."""
        if count_images(messages) > MOST_IMAGES:
            raise ValueError(f"{count_images(messages)} images are too many: at most {MOST_IMAGES} are taken")
        for message in messages:
            for image in message.images:
                self._tokens(image)

    def render(self, messages: History, tools: Tools = (), *, generation_prompt: bool = False) -> Rendered:
        if not count_images(messages):
            return self.inner.render(messages, tools, generation_prompt=generation_prompt)
        rendered = self.inner.render(self._as_texts(messages), tools, generation_prompt=generation_prompt)
        return self._expand(rendered, messages)

    def extend(
        self, token_ids: TokenIds, new_messages: History, tools: Tools = (), *, reply: int = 0, history: History = ()
    ) -> Rendered | None:
        if count_images(history):
            before = len(token_ids) - reply
            token_ids = [*self._collapsed(token_ids[:before]), *token_ids[before:]]
        if not count_images(history) and not count_images(new_messages):
            return self.inner.extend(token_ids, new_messages, tools, reply=reply, history=history)
        new, old = self._as_texts(new_messages), self._as_texts(history)
        rendered = self.inner.extend(token_ids, new, tools, reply=reply, history=old)
        return None if rendered is None else self._expand(rendered, new_messages)

    def _expand(self, rendered: Rendered, messages: History) -> Rendered:
        """Repeat the placeholders of every message that holds images."""
        found = [self._expand_segment(segment, messages) for segment in rendered.segments]
        if sum(len(segment.images) for segment in found) != count_images(messages):
            raise ValueError("the chat template leaves out images of these messages")
        return Rendered(found)

    def _expand_segment(self, segment: Segment, messages: History) -> Segment:
        images = () if segment.message is None else messages[segment.message].images
        if not images:
            return segment
        counts = [self._tokens(image) for image in images]
        try:
            token_ids, starts = expand_placeholders(segment.token_ids, self._placeholder, counts)
        except HeadwayError:
            raise ValueError(
                f"the text of a message with images must not hold {self._text.placeholder} itself"
            ) from None
        uses = tuple(
            ImageUse(at, tokens, image.digest) for at, tokens, image in zip(starts, counts, images, strict=True)
        )
        return replace(segment, token_ids=token_ids, content=[False] * len(token_ids), images=uses)

    def _tokens(self, image: MessageImage) -> int:
        """Count the tokens of an image. Raises ValueError where it can't be taken."""
        try:
            grid = self.reader.grid(image.digest, image.data)
        except HeadwayError as error:
            raise ValueError(str(error)) from None
        return feature_count(grid, self.reader.processor.merge)

    def _collapsed(self, token_ids: TokenIds) -> list[int]:
        """One placeholder for each run, as texts have it."""
        found: list[int] = []
        for token, run in groupby(token_ids):
            found += [token] if token == self._placeholder else run
        return found

    def _as_texts(self, messages: History) -> list[Message]:
        """The messages with marks in their texts for their images."""
        return [_as_text(message, self._text) for message in messages]


def _as_text(message: Message, text: ImageText) -> Message:
    if not message.images:
        return message
    cuts = [0, *(image.at for image in message.images), len(message.content)]
    parts = [message.content[start:end] for start, end in pairwise(cuts)]
    content = text.mark.join(part.strip() if text.strips else part for part in parts)
    return msgspec.structs.replace(message, content=content, images=())


def seeing(renderer: Renderer, folder: Path, config: VisionConfig, text: ImageText) -> Renderer:
    """The renderer of a model that sees, given that of its texts."""
    placeholder = config.image_token
    if renderer.encode(text.placeholder) != [placeholder]:
        raise HeadwayError(
            f"{folder}: token {placeholder}, which stands for images, is not {text.placeholder} in the tokenizer"
        )
    return VisionRenderer(renderer, image_reader(load_processor(folder)), placeholder, text)
