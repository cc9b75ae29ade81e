"""Memory of a GPU that several processes on one host use: one allocates and passes a handle on, others open it.

By the CUDA driver's own library, since torch shares memory between its own children alone. A handle is 64 bytes, valid
while the process that made it lives and has not freed the memory.
"""

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headway.core.errors import HeadwayError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Block:
    """Memory as torch likes to be told of it. It stays somebody else's."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


_own: dict[str, Tensor] = {}
"""What this process allocated: the driver opens handles of other processes alone."""


def gpu_uuid(device: torch.device) -> str:
    """Which GPU it is, whatever number a process knows it by."""
    return str(torch.cuda.get_device_properties(device).uuid)


def allocate(size: int, device: torch.device) -> tuple[Tensor, str]:
    """`size` flat bytes, and their handle in hex. Raises HeadwayError."""
    with torch.cuda.device(device):
        _make_current()
        address, handle = _allocated(size), _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        name = bytes(handle).hex()
        _own[name] = as_bytes(address.value or 0, size, device)
    return _own[name], name


def _allocated(size: int) -> ctypes.c_uint64:
    """If need be, torch gives back what it keeps for later."""
    address = ctypes.c_uint64()
    with suppress(HeadwayError):
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address
    torch.cuda.empty_cache()
    try:
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    except HeadwayError as error:
        raise HeadwayError(
            f"the GPU has no room for {size / 1e9:.3g} GB of weights on their way to an engine ({error}); "
            'lower inference.kv_memory_gb, or set weights.type = "filesystem"'
        ) from None
    return address


def release(handle: str) -> None:
    """Free what `allocate` gave. Processes that still have it open lose it."""
    memory = _own.pop(handle)
    with torch.cuda.device(memory.device):
        torch.cuda.synchronize()
        _call("cuMemFree_v2", ctypes.c_uint64(memory.data_ptr()))


def open_handle(handle: str, size: int, device: torch.device) -> Tensor:
    """Another process's memory on `device`. Raises HeadwayError where it is gone or out of reach."""
    if handle in _own:
        return _own[handle]
    raw = bytes.fromhex(handle)
    if len(raw) != _HANDLE_BYTES:
        raise HeadwayError(f"a handle of GPU memory has {_HANDLE_BYTES} bytes, not {len(raw)}")
    with torch.cuda.device(device):
        _make_current()
        address, opened = ctypes.c_uint64(), _Handle.from_buffer_copy(raw)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return as_bytes(address.value or 0, size, device)


def as_bytes(address: int, size: int, device: torch.device) -> Tensor:
    """Memory of `device` that is allocated or open, as flat bytes."""
    return torch.as_tensor(_Block(address, size), device=device)


def close_handle(handle: str, memory: Tensor) -> None:
    """Let go of what `open_handle` gave. That the other process has ended meanwhile is no error."""
    if handle not in _own:
        with torch.cuda.device(memory.device), suppress(HeadwayError):
            torch.cuda.synchronize()
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(memory.data_ptr()))


def pin(memory: Tensor) -> None:
    """Lock pages of the host's memory, so that GPUs copy from and to them by themselves.

    Where the host allows no more of them to be locked, copies are slower, and that is all.
    """
    _make_current()
    with suppress(HeadwayError):
        size = ctypes.c_size_t(memory.nbytes)
        _call("cuMemHostRegister_v2", ctypes.c_void_p(memory.data_ptr()), size, ctypes.c_uint(_PORTABLE))


def unpin(memory: Tensor) -> None:
    """Before memory that was pinned is given back."""
    _make_current()
    with suppress(HeadwayError):
        _call("cuMemHostUnregister", ctypes.c_void_p(memory.data_ptr()))


def _make_current() -> None:
    """A thread that has called CUDA's runtime, as torch does here, has a context that the driver's functions find.
    And what was begun before is done."""
    torch.cuda.synchronize()


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise HeadwayError(f"the CUDA driver's library cannot be loaded ({error})") from None


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"error {code}"
        raise HeadwayError(f"{name} failed: {reason}")
