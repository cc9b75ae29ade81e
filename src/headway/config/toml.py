"""Settings as TOML text: keys and values by `tomli_w`, laid out in sections here so that each line can have a note."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

import tomli_w

from headway.config.base import Settings

Note = Callable[[str], str | None]
"""Returns what to remark beside a dotted name; None for nothing."""


def to_toml(settings: Settings, note: Note = lambda name: None) -> str:
    """Write TOML that loads to equal settings. None is left out, or is the text "none" where the default is not."""
    return dump(_raw(settings), note)


def dump(table: Mapping[str, Any], note: Note = lambda name: None) -> str:
    """Write a table of plain values as TOML; entries that are None are left out."""
    return "\n".join(_lines(table, "", "", note)).strip() + "\n"


def entry(key: str, value: object) -> str:
    """Write `key = value` as one line."""
    lines = tomli_w.dumps({key: _plain(value)}, indent=0).strip()
    # Texts escape their newlines, so these are between the items of lists.
    return lines.replace(",\n]", "]").replace("[\n", "[").replace(",\n", ", ")


def _raw(settings: Settings) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for name, info in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, Settings):
            raw[name] = _raw(value)
        elif isinstance(value, list) and value and all(isinstance(item, Settings) for item in value):
            raw[name] = [_raw(item) for item in value]
        else:
            raw[name] = "none" if value is None and info.default is not None else value
    return raw


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value if item is not None]
    return str(value) if isinstance(value, PurePath) else value


def _lines(table: Mapping[str, Any], header: str, name: str, note: Note) -> Iterator[str]:
    """Yield simple values first, since whatever follows a table's header belongs to it."""
    below = {key: value for key, value in table.items() if _is_table(value)}
    for key, value in table.items():
        if key not in below and value is not None:
            remark = note(name + key)
            yield entry(key, value) + (f"  # {remark}" if remark else "")
    for key, value in below.items():
        place = header + entry(key, 0).removesuffix(" = 0")
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from ("", f"[[{place}]]", *_lines(item, f"{place}.", f"{name}{key}.{index}.", note))
        else:
            yield from ("", f"[{place}]", *_lines(value, f"{place}.", f"{name}{key}.", note))


def _is_table(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping)
