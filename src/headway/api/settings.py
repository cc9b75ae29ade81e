"""Settings from Python: files, and dictionaries over them, refused as those of the command line are."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from headway.config.base import Settings
from headway.config.loader import load_settings
from headway.config.rl import RlSettings

S = TypeVar("S", bound=Settings)


def settings(*files: str | Path, **changes: Any) -> RlSettings:
    """Make settings from files, later ones over earlier ones, and changes: `settings("rl.toml", max_steps=10)`.

    Sections are dictionaries: `trainer={"optim": {"lr": 1e-5}}`. Raises UsageError on what files or changes have wrong.
    """
    return make_settings(RlSettings, changes, files)


def make_settings(kind: type[S], changes: Mapping[str, Any], files: Sequence[str | Path] = ()) -> S:
    """Make settings of any command. Raises UsageError with a line for each that is wrong."""
    argv = [word for file in files for word in ("@", str(file))]
    return load_settings(kind, argv, changes=_plain(changes)).settings


def _plain(value: Any) -> Any:
    """Write paths as texts and tuples as lists, as files of settings have them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, BaseModel):
        return _plain(value.model_dump())
    return str(value) if isinstance(value, Path) else value
