"""The base of all settings: unknown keys are refused, and a docstring below a field is its documentation."""

from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Settings(BaseModel):
    # Pydantic could read the docstrings below fields; that is a third of what importing all settings takes, for every
    # process, and only the reference needs them, which reads them itself.
    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, allow_inf_nan=False)


class Plugin(Settings):
    """A class or function of your own (docs/bring_your_own.md)."""

    path: str
    """`file.py:Name`, `package.module:Name`, or the name of an installed package's entry point."""
    args: dict[str, Any] = {}
    """Keyword arguments for it."""


def broken_rule(field: str, reason: str) -> PydanticCustomError:
    """The error a validator raises when settings don't fit together.

    `field` is the dotted path, relative to the validated model, of the setting to change; `reason` continues
    the sentence that starts with it ("must be at least 2: ..."). The loader adds the file or flag it came from.
    """
    return PydanticCustomError("broken_rule", "{field} {reason}", {"field": field, "reason": reason})
