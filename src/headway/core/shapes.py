"""The shape of a reply: what changes the distribution of its tokens besides temperature and filters."""

import math
from typing import Any

import msgspec

from headway.base.errors import HeadwayError

MAX_PENALTY, MAX_BIAS, MAX_BIASES = 2.0, 100.0, 1024
_ANY_OBJECT = '{"type":"object"}'


class ShapeError(HeadwayError):
    """A shape that no reply can have; `param` names the field at fault."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class ReplyShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """OpenAI's fields that change which tokens a reply is drawn from. The defaults change nothing.

    A token that the reply has `c` times already loses `c * frequency_penalty + presence_penalty` of its logit, and gets
    what `logit_bias` has for its id. `response_format` asks for JSON, by a schema or any object. With `free_until` that
    begins after the first token of this id, which ends the model's reasoning. A reply that begins with `call_token`,
    which opens a call of a tool, is free of the format.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    response_format: dict[str, Any] | None = None
    free_until: int | None = None
    call_token: int | None = None

    @property
    def shaped(self) -> bool:
        """True where the reply is drawn from another distribution than the model's own."""
        penalized = self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalized or bool(self.logit_bias) or self.response_format is not None

    def check_shape(self, vocab_size: int | None = None) -> None:
        """Raise ShapeError on numbers out of range, tokens that a vocabulary of `vocab_size` lacks, and formats that
        do not exist."""
        for name in ("frequency_penalty", "presence_penalty"):
            if not abs(getattr(self, name)) <= MAX_PENALTY:
                raise ShapeError(f"{name} must be {-MAX_PENALTY:g} to {MAX_PENALTY:g}", name)
        if len(self.logit_bias) > MAX_BIASES:
            raise ShapeError(f"logit_bias takes up to {MAX_BIASES} tokens", "logit_bias")
        last = math.inf if vocab_size is None else vocab_size - 1
        if not all(0 <= token <= last for token in self.logit_bias):
            raise ShapeError(f"token ids in logit_bias must be 0 to {last:g}", "logit_bias")
        if not all(abs(bias) <= MAX_BIAS for bias in self.logit_bias.values()):
            raise ShapeError(f"a logit_bias must be {-MAX_BIAS:g} to {MAX_BIAS:g}", "logit_bias")
        if self.call_token is not None and not 0 <= self.call_token <= last:
            raise ShapeError(f"call_token must be 0 to {last:g}", "call_token")
        self.json_schema()

    def json_schema(self) -> str | None:
        """The JSON schema that the reply must satisfy, as text; None where it is free. Raises ShapeError."""
        kind = "text" if self.response_format is None else self.response_format.get("type")
        if self.response_format is None or kind == "text":
            return None
        if kind == "json_object":
            return _ANY_OBJECT
        if kind != "json_schema":
            raise ShapeError('response_format must have type "text", "json_object" or "json_schema"', "response_format")
        named = self.response_format.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if not isinstance(schema, dict):
            raise ShapeError("response_format needs the schema: json_schema.schema", "response_format")
        return msgspec.json.encode(schema).decode()

    def openai_fields(self) -> dict[str, Any]:
        """The fields of a request that asks for this shape."""
        fields: dict[str, Any] = {name: getattr(self, name) or None for name in SHAPE_FIELDS}
        if self.logit_bias:
            fields["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return fields


SHAPE_FIELDS = ("frequency_penalty", "presence_penalty", "logit_bias", "response_format")
