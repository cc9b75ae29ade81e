"""Settings as TOML text."""

import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import date, time
from pathlib import PurePath
from typing import Any

from headway.config.base import Settings

Note = Callable[[str], str | None]
"""Says what to remark beside a dotted name; None for nothing."""


def to_toml(settings: Settings, note: Note = lambda name: None) -> str:
    """TOML that loads to equal settings. None is left out, or the text "none" where the default is something else."""
    return dump(_raw(settings), note)


def dump(table: Mapping[str, Any], note: Note = lambda name: None) -> str:
    """A table of plain values as TOML; entries that are None are left out."""
    lines: list[str] = []
    _table(table, "", "", lines, note)
    return "\n".join(lines).strip() + "\n"


def _raw(settings: Settings) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, Settings):
            raw[name] = _raw(value)
        elif isinstance(value, list) and value and all(isinstance(item, Settings) for item in value):
            raw[name] = [_raw(item) for item in value]
        elif value is not None:
            raw[name] = value
        elif info.default is not None:
            raw[name] = "none"
    return raw


def _table(table: Mapping[str, Any], header: str, name: str, lines: list[str], note: Note) -> None:
    """Simple values first, since whatever follows a table's header belongs to it."""
    below = {key: value for key, value in table.items() if _is_table(value)}
    for key, value in table.items():
        if key not in below and value is not None:
            remark = note(name + key)
            lines.append(f"{_key(key)} = {value_text(value)}" + (f"  # {remark}" if remark else ""))
    for key, value in below.items():
        place = header + _key(key)
        if isinstance(value, list):
            for index, item in enumerate(value):
                lines += ["", f"[[{place}]]"]
                _table(item, f"{place}.", f"{name}{key}.{index}.", lines, note)
        else:
            lines += ["", f"[{place}]"]
            _table(value, f"{place}.", f"{name}{key}.", lines, note)


def _is_table(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def value_text(value: object) -> str:
    """A value as a TOML literal."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else str(value)
        case str() | PurePath():
            return _text(str(value))
        case date() | time():
            return value.isoformat()
        case list() | tuple():
            return "[" + ", ".join(value_text(item) for item in value if item is not None) + "]"
        case Mapping():
            return "{" + ", ".join(f"{_key(k)} = {value_text(v)}" for k, v in value.items() if v is not None) + "}"
    raise TypeError(f"TOML has no {type(value).__name__}")


def _text(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
