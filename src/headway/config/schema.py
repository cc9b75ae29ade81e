"""The schema of a settings class: the keys of each section, and the kind of value that belongs there."""

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from headway.config.base import Settings


def is_none_text(value: object) -> bool:
    return value in ("none", "None")


@dataclass(frozen=True)
class Field:
    """One setting: its kind and its default (PydanticUndefined when it is required)."""

    kind: "Kind"
    default: Any

    @property
    def required(self) -> bool:
        return self.default is PydanticUndefined


@dataclass(frozen=True)
class Kind:
    """A type annotation, taken apart."""

    annotation: Any

    @cached_property
    def members(self) -> tuple[Any, ...]:
        """The alternatives of a union, without None; a single type is its own only alternative."""
        return tuple(member for member in _alternatives(self.annotation) if member is not type(None))

    @cached_property
    def optional(self) -> bool:
        return type(None) in _alternatives(self.annotation)

    @cached_property
    def models(self) -> tuple[type[Settings], ...]:
        return tuple(m for m in self.members if isinstance(m, type) and issubclass(m, Settings))

    @property
    def is_settings(self) -> bool:
        """A section: one settings class, or a union of them."""
        return bool(self.models)

    @property
    def is_model(self) -> bool:
        """One settings class."""
        return len(self.models) == 1 and not self.tags

    @property
    def is_list(self) -> bool:
        return any(get_origin(member) is list for member in self.members)

    @property
    def is_table(self) -> bool:
        """A dictionary with keys of the user's own."""
        return any(member is dict or get_origin(member) is dict for member in self.members)

    @property
    def is_bool(self) -> bool:
        return self.members == (bool,)

    @property
    def is_text(self) -> bool:
        """Any text is a value as it stands."""
        return any(member in (str, Path) or _is_choice_of_text(member) for member in self.members)

    @cached_property
    def tags(self) -> dict[str, type[Settings]]:
        """The members of a union of sections by their `type`; empty for anything else."""
        if len(self.models) < 2:
            return {}
        return {get_args(model.model_fields["type"].annotation)[0]: model for model in self.models}

    def tagged(self, tag: object) -> "Kind":
        """Return the union's member named `tag`; the kind itself where it is no union or has no such member."""
        return Kind(self.tags[tag]) if isinstance(tag, str) and tag in self.tags else self

    def fields(self) -> Mapping[str, Field]:
        """Return the settings of a section, or of all members of a union; the first member that has a name wins."""
        return _fields(self.models)

    def item(self) -> "Kind":
        """Return the kind of a list's items or a table's values."""
        for member in self.members:
            if get_origin(member) in (list, dict):
                return Kind(get_args(member)[-1])
        return Kind(Any)

    def from_toml(self, value: Any) -> Any:
        """Convert a value from TOML to this kind: text to a path, a list to a tuple. Others stay."""
        if isinstance(value, str) and Path in self.members:
            return Path(value)
        if isinstance(value, list) and any(get_origin(member) is tuple for member in self.members):
            return tuple(value)
        if isinstance(value, list) and self.is_list:
            return [self.item().from_toml(item) for item in value]
        return value

    def child(self, key: str) -> "Kind":
        """Return the kind at a key below this one; Any where there is none, which a later check refuses."""
        if self.is_settings:
            field = self.fields().get(key)
            return field.kind if field else Kind(Any)
        return self.item()


@cache
def _fields(models: tuple[type[Settings], ...]) -> Mapping[str, Field]:
    found: dict[str, Field] = {}
    for model in models:
        for name, info in model.model_fields.items():
            default = info.get_default(call_default_factory=True, validated_data={})
            found.setdefault(name, Field(Kind(info.annotation), default))
    return found


def _is_choice_of_text(member: Any) -> bool:
    return get_origin(member) is Literal and all(isinstance(choice, str) for choice in get_args(member))


def _alternatives(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _alternatives(member)
    else:
        yield annotation
