"""GPU memory shared by processes of one host (CUDA IPC): one allocates and passes a handle on, others open it.

This calls the CUDA driver, since torch shares memory only with its own child processes. A handle has 64 bytes, and is
valid while the process that made it lives and has not freed the memory.
"""

import ctypes
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headway.base.errors import HeadwayError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_PORTABLE = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Block:
    """Describes memory to torch, which does not own it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


_own: dict[str, Tensor] = {}
"""What this process allocated, by handle: the driver opens only handles of other processes."""


def gpu_uuid(device: torch.device) -> str:
    """Identify a GPU, whatever number a process knows it by."""
    return str(torch.cuda.get_device_properties(device).uuid)


def allocate(size: int, device: torch.device) -> tuple[Tensor, str]:
    """Allocate `size` flat bytes. Returns them and their handle in hex. Raises HeadwayError."""
    with torch.cuda.device(device):
        _make_current()
        address, handle = _allocated(size), _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        name = bytes(handle).hex()
        _own[name] = as_bytes(address.value or 0, size, device)
    return _own[name], name


def _allocated(size: int) -> ctypes.c_uint64:
    """Allocate; where memory is short, after torch has freed its cache."""
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
    """Free what `allocate` returned. Processes that still have it open lose it."""
    memory = _own.pop(handle)
    with torch.cuda.device(memory.device):
        torch.cuda.synchronize()
        _call("cuMemFree_v2", ctypes.c_uint64(memory.data_ptr()))


def open_handle(handle: str, size: int, device: torch.device) -> Tensor:
    """Open another process's memory on `device`. Raises HeadwayError where it is freed or can't be reached."""
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
    """View memory of `device` that is allocated or open as flat bytes."""
    return torch.as_tensor(_Block(address, size), device=device)


def close_handle(handle: str, memory: Tensor) -> None:
    """Close what `open_handle` returned. It is no error if the other process has ended meanwhile."""
    if handle not in _own:
        with torch.cuda.device(memory.device), suppress(HeadwayError):
            torch.cuda.synchronize()
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(memory.data_ptr()))


def pin(memory: Tensor) -> None:
    """Lock pages of host memory, so that GPUs copy from and to them on their own.

    Where the host allows no more locked pages, copies are just slower.
    """
    _make_current()
    with suppress(HeadwayError):
        size = ctypes.c_size_t(memory.nbytes)
        _call("cuMemHostRegister_v2", ctypes.c_void_p(memory.data_ptr()), size, ctypes.c_uint(_PORTABLE))


def unpin(memory: Tensor) -> None:
    """Unlock pages, before the memory is freed."""
    _make_current()
    with suppress(HeadwayError):
        _call("cuMemHostUnregister", ctypes.c_void_p(memory.data_ptr()))


def _make_current() -> None:
    """Give this thread a CUDA context, which a call of the CUDA runtime does, and finish all work begun before."""
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
