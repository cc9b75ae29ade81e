"""Chat messages and tools, in OpenAI's JSON shape."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from headway.core.images import MessageImage, data_url, read_data_url

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True):
    """A call as the model wrote it; `arguments` is JSON text and may be malformed."""

    id: str
    name: str
    arguments: str


class Tool(msgspec.Struct, frozen=True):
    """A function the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)

    def to_openai(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @classmethod
    def from_openai(cls, tool: dict[str, Any]) -> "Tool":
        """Read a tool; null means the default, as clients send it. Raises ValueError on anything malformed."""
        try:
            function = tool["function"]
            read = cls(function["name"], function.get("description") or "", _schema(function.get("parameters")))
            return msgspec.convert(msgspec.to_builtins(read), cls).check()
        except (KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
            raise ValueError(f"a tool is {{type: function, function: {{name, ...}}}}: {error!r}") from None

    def check(self) -> "Tool":
        """Raise ValueError unless `parameters` are the JSON schema of an object, as renderers rely on."""
        properties, required = self.parameters.get("properties"), self.parameters.get("required")
        if not isinstance(properties or {}, dict) or not all(isinstance(p, dict) for p in (properties or {}).values()):
            raise ValueError(f"tool {self.name!r}: parameters.properties must map names to schemas")
        if not isinstance(required or [], list):
            raise ValueError(f"tool {self.name!r}: parameters.required must be a list of names")
        if any(not isinstance(kind.get("enum") or [], list) for kind in (properties or {}).values()):
            raise ValueError(f"tool {self.name!r}: an enum must be a list")
        return self


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a conversation. `images` stand in its text, in order."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    images: tuple[MessageImage, ...] = ()

    def to_openai(self) -> dict[str, Any]:
        out: dict[str, Any] = {"role": self.role, "content": self._parts() if self.images else self.content}
        if self.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        for key in ("tool_call_id", "name"):
            if (value := getattr(self, key)) is not None:
                out[key] = value
        if self.reasoning is not None:
            out["reasoning_content"] = self.reasoning
        return out

    @classmethod
    def from_openai(cls, message: dict[str, Any], read_url: Callable[[object], bytes] = read_data_url) -> "Message":
        """Read a message whose content is a string or a list of parts, texts and images. `read_url` returns the bytes
        of an image, given its address. Raises ValueError on anything else."""
        calls = tuple(
            ToolCall(c.get("id", ""), c["function"]["name"], c["function"]["arguments"])
            for c in message.get("tool_calls") or ()
        )
        content, images = _content(message.get("content"), read_url)
        if images and message["role"] == "assistant":
            raise ValueError("an assistant's message can't hold images")
        return cls(
            role=message["role"],
            content=content,
            tool_calls=calls,
            tool_call_id=message.get("tool_call_id"),
            name=message.get("name"),
            reasoning=message.get("reasoning_content"),
            images=images,
        )

    def without_bytes(self) -> "Message":
        """The message as records keep it: images by their digests alone."""
        if not any(image.data for image in self.images):
            return self
        return msgspec.structs.replace(self, images=tuple(MessageImage(i.at, i.digest) for i in self.images))

    def _parts(self) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        start = 0
        for image in self.images:
            parts += _text_part(self.content[start : image.at])
            parts.append({"type": "image_url", "image_url": {"url": image.url}})
            start = image.at
        return parts + _text_part(self.content[start:])


Messages = str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]]
"""A conversation as authors may write it: a user's text, one message, or several."""


def as_messages(value: Messages) -> list[Message]:
    """Turn `value` into messages: text becomes a user's message, dicts are read in OpenAI's shape.

    Raises ValueError where something is neither.
    """
    if isinstance(value, str):
        return [Message("user", value)]
    if isinstance(value, Message | Mapping):
        return [_message(value)]
    return [_message(item) for item in value]


def _message(value: object) -> Message:
    if isinstance(value, Message):
        return value
    if isinstance(value, Mapping):
        try:
            return msgspec.convert(msgspec.to_builtins(Message.from_openai(dict(value))), Message)
        except (KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
            raise ValueError(f"not a chat message: {error!r}") from error
    raise ValueError(f"a message is text, a dict or a Message, not {type(value).__name__}")


def count_images(messages: Sequence[Message]) -> int:
    """Count the images of a conversation."""
    return sum(len(message.images) for message in messages)


def image_part(data: bytes) -> dict[str, Any]:
    """An encoded image (PNG, JPEG, WebP or GIF) as a part of a message's content, in OpenAI's shape."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def _schema(parameters: Any) -> Any:
    return {} if parameters is None else parameters


def _text_part(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _content(content: object, read_url: Callable[[object], bytes]) -> tuple[str, tuple[MessageImage, ...]]:
    """The text of a message's content, and the images that stand in it."""
    if content is None:
        return "", ()
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ValueError("message content must be text or a list of text and image parts")
    text, images = "", list[MessageImage]()
    for part in content:
        if part.get("type") == "text":
            text += part["text"]
        elif part.get("type") == "image_url":
            shown = part.get("image_url")
            url = shown.get("url") if isinstance(shown, dict) else shown
            images.append(MessageImage.of(read_url(url), len(text)))
        else:
            raise ValueError("message content must be text or a list of text and image parts")
    return text, tuple(images)
