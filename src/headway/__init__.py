"""Headway: asynchronous reinforcement learning for language-model agents.

The Python interface is here, by name; what a name needs is imported when it is used, so that `import headway` is quick.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_PLACES = {
    "rl": "headway.api.start",
    "settings": "headway.api.settings",
    "RlSettings": "headway.config.rl",
    "Run": "headway.api.run",
    "Engine": "headway.api.engine",
    "Environment": "headway.envs.base",
    "SingleTurn": "headway.envs.base",
    "MultiTurn": "headway.envs.base",
    "Task": "headway.envs.base",
    "reward": "headway.envs.base",
    "metric": "headway.envs.base",
    "tool": "headway.envs.base",
    "HeadwayError": "headway.base.errors",
}
"""Names of the Python interface, and the modules that they are of."""

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
