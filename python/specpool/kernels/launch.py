"""`launch`: the one function that launches kernels, on a CUDA device or on a test's host back end.

CuPy builds all kernels as one module, once per device: at first use, or in `prepare`, which must
come before the capture of a CUDA graph. Launches go to torch's current stream and allocate nothing.
No CuPy arrays are used: a tensor is passed as its address, and a number as a NumPy scalar of the
parameter's exact type.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

import specpool._core as _core
from specpool.errors import ConfigError, OrderError, ShapeError

Arg = Tensor | np.generic | None
"""An argument of a kernel; None is a null pointer."""

SHARED_BYTES = 44 << 10
"""Bytes of dynamic shared memory per block that every GPU allows by default, beside the kernels'
static shared memory."""


class Backend(Protocol):
    """The part that runs kernels on tensors of one kind of device."""

    def launch(
        self,
        entry: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Arg],
        shared_mem: int,
        touches: Sequence[Tensor],
    ) -> None:
        """Run or enqueue one kernel; `touches` are buffers that it reaches by address."""


_host: Backend | None = None


@contextlib.contextmanager
def host_backend(backend: Backend) -> Iterator[None]:
    """Run kernels on CPU tensors with `backend` within the block, for tests."""
    global _host
    before, _host = _host, backend
    try:
        yield
    finally:
        _host = before


def runs_kernels(device: torch.device) -> bool:
    """Return whether kernels run on tensors of `device`; if not, their CPU twins run."""
    return _host is not None or device.type == "cuda"


def launch(
    entry: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[Arg],
    *,
    shared_mem: int = 0,
    touches: Sequence[Tensor] = (),
) -> None:
    """Launch a kernel on the device of its tensors; do nothing if the grid is empty.

    Args:
        entry: name of the kernel in `cuda/`, without the suffix `_kernel`.
        grid: blocks, one to three sizes.
        block: threads, one to three sizes.
        args: tensors, None, and NumPy scalars of the parameters' exact types.
        shared_mem: bytes of dynamic shared memory.
        touches: buffers that the kernel reaches through addresses in device memory.

    Raises:
        ConfigError: CuPy is missing, or cannot build the kernels with this driver.
        OrderError: the first use on a device is within the capture of a CUDA graph.
        ShapeError: the tensors are on a CPU; use the twins in `specpool.kernels.twins`.
    """
    if 0 in grid:
        return
    device = _device(args)
    backend = _cuda if device.type == "cuda" else _host
    if backend is None:
        raise ShapeError(f"{entry} needs tensors on a CUDA device, got {device}")
    backend.launch(f"{entry}_kernel", grid, block, args, shared_mem, touches)


def prepare(device: torch.device) -> None:
    """Build and load every kernel for a CUDA device, unless this was done before.

    Raises:
        ConfigError: CuPy is missing, or cannot build the kernels with this driver.
    """
    _cuda.kernels(device)


@functools.cache
def source() -> str:
    """Return the source of all kernels, with `#line` marks of their own files."""
    return "".join(
        f'#line 1 "{name}"\n{_core.kernel_source(name)}\n' for name in _core.KERNEL_FILES
    )


def entries() -> list[str]:
    """Return the names of all kernels."""
    return re.findall(r"__global__ void (?:__launch_bounds__\([\w, ]+\) )?(\w+)\(", source())


class CudaBackend:
    """CuPy's compiler and launcher."""

    def __init__(self) -> None:
        self._kernels: dict[int, dict[str, Any]] = {}  # by device, then by name
        self._streams: dict[int, _Stream] = {}  # by address

    def kernels(self, device: torch.device) -> dict[str, Any]:
        """Return every kernel by name, loaded on `device`."""
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self._kernels:
            if torch.cuda.is_current_stream_capturing():
                raise OrderError("call specpool.kernels.launch.prepare before a capture")
            self._kernels[index] = _build(index)
        return self._kernels[index]

    def launch(
        self,
        entry: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Arg],
        shared_mem: int,
        touches: Sequence[Tensor],
    ) -> None:
        """Enqueue the kernel on torch's current stream."""
        device = _device(args)
        kernel = self.kernels(device)[entry]
        # A list, because a generator costs more than what it makes.
        packed = tuple([_packed(arg) for arg in args])
        address = _current_stream(device)
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = _Stream(address)
        if device.index == torch.cuda.current_device():  # a switch and back takes microseconds
            kernel(grid, block, packed, shared_mem=shared_mem, stream=stream)
            return
        with torch.cuda.device(device):
            kernel(grid, block, packed, shared_mem=shared_mem, stream=stream)


def _device(args: Sequence[Arg]) -> torch.device:
    """Return the device of the first tensor."""
    for arg in args:
        if isinstance(arg, Tensor):
            return arg.device
    raise ShapeError("a launch needs a tensor")


# torch's function for other launchers of kernels, such as Triton's: it makes no object.
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _current_stream(device: torch.device) -> int:
    """Return the address of torch's current stream."""
    if _raw_stream is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Stream:
    """The part of a CuPy stream that a launch reads.

    CuPy 14.0 cannot wrap a stream of torch, and torch 2.9 cannot hand one over.
    """

    ptr: int


_cuda = CudaBackend()


def _packed(arg: Arg) -> int | np.generic:
    if arg is None:
        return 0
    return arg.data_ptr() if isinstance(arg, Tensor) else arg


def _extra() -> str:
    """Return the pip command that installs CuPy for this torch."""
    major = (torch.version.cuda or "13").split(".")[0]
    return f"pip install 'specpool[cuda{major}]'"


def missing() -> str | None:
    """Return what this Python lacks to build kernels, as a sentence; None if it lacks nothing."""
    try:
        _cupy()
    except ConfigError as error:
        return str(error)
    return None


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(f"the CUDA kernels need CuPy: {_extra()}") from error
    return cupy


def _build(index: int) -> dict[str, Any]:
    cupy = _cupy()
    try:
        with cupy.cuda.Device(index):
            module = cupy.RawModule(code=source(), options=("--std=c++17",))
            kernels = {name: module.get_function(name) for name in entries()}
            for kernel in kernels.values():
                # Reading an attribute loads the kernel; within a capture that would fail.
                _ = kernel.num_regs
            return kernels
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"CuPy {cupy.__version__} cannot build the kernels for cuda:{index} ({reason[0]}): "
            f"{_extra()}, or install a newer driver"
        ) from error
