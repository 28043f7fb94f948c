"""The one seam through which a kernel is launched: `cuda` here, `host` plugged in by the tests.

All kernels are one module, built by CuPy once for each device: at first use, or by `prepare`, which
a CUDA-graph capture needs first. Launches go to torch's current stream and allocate nothing. No
CuPy arrays: tensors go as addresses, numbers as NumPy scalars of the parameter's exact type.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

import specpool._core as _core
from specpool.errors import ConfigError, OrderError, ShapeError

Arg = Tensor | np.generic | None
"""None is a null pointer."""

SHARED_BYTES = 44 << 10
"""Dynamic shared memory of a block that every GPU grants unasked, beside what kernels declare."""


class Backend(Protocol):
    """Runs kernels on tensors of its own kind of device."""

    def launch(
        self,
        entry: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Arg],
        shared_mem: int,
        touches: Sequence[Tensor],
    ) -> None:
        """Runs or enqueues one kernel; `touches` are buffers that it reaches by address."""


_host: Backend | None = None


@contextlib.contextmanager
def host_backend(backend: Backend) -> Iterator[None]:
    """Runs kernels on CPU tensors with `backend`, which the tests have."""
    global _host
    before, _host = _host, backend
    try:
        yield
    finally:
        _host = before


def runs_kernels(device: torch.device) -> bool:
    """Whether kernels run on tensors of `device`; where they do not, their CPU twins do."""
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
    """Launches a kernel on the device of its tensors; nothing where the grid is empty.

    Args:
        entry: name of the kernel in `cuda/`, without its `_kernel`.
        grid: blocks, one to three sizes.
        block: threads, one to three sizes.
        args: tensors, None, and NumPy scalars of the parameters' exact types.
        shared_mem: bytes of dynamic shared memory.
        touches: buffers that the kernel reaches through addresses in device memory.

    Raises:
        ConfigError: CuPy is missing, or cannot use this driver.
        OrderError: first use within the capture of a CUDA graph.
        ShapeError: CPU tensors, for which the twins in `specpool.kernels.twins` are.
    """
    if 0 in grid:
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    backend = _cuda if device.type == "cuda" else _host
    if backend is None:
        raise ShapeError(f"{entry} needs tensors on a CUDA device, got {device}")
    backend.launch(f"{entry}_kernel", grid, block, args, shared_mem, touches)


def prepare(device: torch.device) -> None:
    """Builds and loads every kernel for a CUDA device, if that has not been done.

    Raises:
        ConfigError: CuPy is missing, or cannot use this driver.
    """
    _cuda.kernels(device)


@functools.cache
def source() -> str:
    """The text of all kernels, with their own file names and lines."""
    return "".join(
        f'#line 1 "{name}"\n{_core.kernel_source(name)}\n' for name in _core.KERNEL_FILES
    )


def entries() -> list[str]:
    """The names of all kernels."""
    return re.findall(r"__global__ void (?:__launch_bounds__\(\w+\) )?(\w+)\(", source())


class CudaBackend:
    """CuPy's compiler and launcher."""

    def __init__(self) -> None:
        self._kernels: dict[int, dict[str, Any]] = {}  # by device, then by name

    def kernels(self, device: torch.device) -> dict[str, Any]:
        """Every kernel, loaded on `device`."""
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
        """Enqueues the kernel on torch's current stream."""
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        kernel = self.kernels(device)[entry]
        packed = tuple(_packed(arg) for arg in args)
        cupy = _cupy()
        stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
        with cupy.cuda.Device(device.index), stream:
            kernel(grid, block, packed, shared_mem=shared_mem)


_cuda = CudaBackend()


def _packed(arg: Arg) -> int | np.generic:
    if arg is None:
        return 0
    return arg.data_ptr() if isinstance(arg, Tensor) else arg


def _extra() -> str:
    """What to install beside this torch."""
    major = (torch.version.cuda or "13").split(".")[0]
    return f"pip install 'specpool[cuda{major}]'"


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
                # Asking for it loads the kernel, which a capture may not do.
                _ = kernel.num_regs
            return kernels
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"CuPy {cupy.__version__} cannot build the kernels for cuda:{index} ({reason[0]}): "
            f"{_extra()}, or install a newer driver"
        ) from error
