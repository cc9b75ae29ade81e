"""Operations and their backends: the plain torch function, and faster ones for what they take.

    @Op
    def rms_norm(x, weight, eps): ...                                   # the reference

    @rms_norm.backend("c", takes=in_c)
    def _rms_norm_c(x, weight, eps): ...

    rms_norm.backend("triton", takes=in_triton)("headway.models.ops.triton.rms_norm:rms_norm")

A call goes to the first backend whose predicate holds, else to the reference. Backends that are named by a string are
imported when they are first called: a process without a GPU must not spend its start on Triton.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from headway.base.devices import triton_installed
from headway.models.ops.native import library

P = ParamSpec("P")
R = TypeVar("R")
Kind = Literal["c", "triton", "torch", "cuda", "flash"]
"""C kernels on a CPU; Triton kernels on CUDA; torch on any device, or its kernels for CUDA; FlashAttention 4."""

OPS: dict[str, "Op[..., Any]"] = {}
_enabled = {"c": False, "triton": True}


def enable(kind: Literal["c", "triton"]) -> bool:
    """Use backends of this kind in this process: those in C are off until a server asks for them. False, with a line in
    the log, where they can't be compiled."""
    _enabled[kind] = kind != "c" or library.load()
    return _enabled[kind]


def disable(kind: Literal["c", "triton"]) -> None:
    """Use them no longer: another backend or the reference takes over."""
    _enabled[kind] = False
    if kind == "c":
        library.unload()


class Backend(Generic[P, R]):
    """One way to compute an operation, for calls whose positional arguments it `takes`. `trains`: its results have
    gradients."""

    def __init__(self, kind: Kind, takes: Callable[..., bool], trains: bool, run: Callable[P, R] | str) -> None:
        self.kind, self.takes, self.trains = kind, takes, trains
        self.name = run if isinstance(run, str) else run.__name__
        self.run: Callable[P, R] = self._import if isinstance(run, str) else run

    def _import(self, *args: P.args, **kwargs: P.kwargs) -> R:
        module, _, function = self.name.partition(":")
        self.run = getattr(import_module(module), function)
        return self.run(*args, **kwargs)


class Op(Generic[P, R]):
    """An operation, called like its reference; its first argument is a tensor."""

    def __init__(self, reference: Callable[P, R]) -> None:
        self.name, self.__doc__ = reference.__name__, reference.__doc__
        self.reference = reference
        self.backends: list[Backend[P, R]] = []
        self._traceable: list[Backend[P, R]] = []
        self._on_cpu: list[Backend[P, R]] = []
        self._on_cuda: list[Backend[P, R]] = []
        OPS[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            backends = self._traceable
        else:
            first: Any = args[0]
            backends = self._on_cuda if first.is_cuda else self._on_cpu
        for backend in backends:
            if backend.takes(*args):
                return backend.run(*args, **kwargs)
        return self.reference(*args, **kwargs)

    def backend(
        self, kind: Kind, *, takes: Callable[..., bool], trains: bool = False, traceable: bool = False
    ) -> Callable[[Callable[..., R] | str], None]:
        """Register a function, or the "module:function" to import for it, behind those registered before. torch's
        compiler sees the reference, which it fuses by itself, and backends that are `traceable`."""

        def register(run: Callable[..., R] | str) -> None:
            backend: Backend[P, R] = Backend(kind, takes, trains, run)
            self.backends.append(backend)
            if traceable:
                self._traceable.append(backend)
            if kind in ("c", "torch"):
                self._on_cpu.append(backend)
            if kind != "c":
                self._on_cuda.append(backend)

        return register


def in_c(x: Tensor, *_: Any) -> bool:
    """C kernels work on float32 on a CPU, in serving passes: they have no gradients."""
    return _enabled["c"] and x.dtype is torch.float32 and torch.is_inference_mode_enabled() and x.is_cpu


def in_triton(x: Tensor, *_: Any) -> bool:
    return x.is_cuda and not torch.compiler.is_compiling() and _enabled["triton"] and triton_installed()


def in_triton_serving(x: Tensor, *_: Any) -> bool:
    """Kernels that give no gradients."""
    # In this order: torch's compiler can't trace the second question.
    return in_triton(x) and torch.is_inference_mode_enabled()


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` in the precision of a computation; its gradient comes back in its own."""
    return weight if weight.dtype is dtype else weight.to(dtype)
