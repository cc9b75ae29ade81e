"""Backends by name, for tests that call one themselves."""

from collections.abc import Callable
from typing import Any

from headway.models.ops.registry import Op


def backend(op: Op[..., Any], name: str) -> Callable[..., Any]:
    """The function of the one backend of `op` whose kind or function is called so."""
    found = [backend for backend in op.backends if name in (backend.kind, backend.name.rpartition(":")[2])]
    assert len(found) == 1, [backend.name for backend in op.backends]
    return found[0].run
