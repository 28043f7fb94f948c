"""A kernel file on the CPU, with the interface of `cupy.RawModule` and `cupy.RawKernel`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Literal

from . import source as source_text
from . import toolchain
from .arguments import Parameter, check, pack, spans_in
from .errors import KERNEL_ERRORS, LaunchError
from .memory import merged, registered_spans

Kind = Literal["fast", "check"]
Order = Literal["forward", "reverse"] | int

SHARED_BYTES = 48 << 10  # static and dynamic, without opting in
MAX_SHARED_BYTES = 227 << 10  # sm_90 with opting in


class _Parameter(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint),
        ("kind", ctypes.c_char),
        ("pointee_size", ctypes.c_uint),
        ("pointee_kind", ctypes.c_char),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("call", ctypes.c_void_p),
        ("num_parameters", ctypes.c_uint),
        ("parameters", ctypes.POINTER(_Parameter)),
    )


class _Options(ctypes.Structure):  # mirrored in runtime/runtime.h
    _fields_ = (("order", ctypes.c_int), ("seed", ctypes.c_int), ("check_races", ctypes.c_int))


class HostModule:
    """An unchanged `.cu` file compiled by g++; each CUDA thread is a fiber.

    Args:
        source: a path, several paths in a row, or the text itself.
        name_expressions: instances of kernel templates to build, such as `copy<int, 4>`; functions
            declared `extern "C" __global__` need none.
        options: more flags for g++, such as `-DNAME`.
        kind: `fast` only runs; `check` also judges every load and store.
        order: in which threads and blocks take turns; a number seeds a random order.
        check_races: off for protocols over plain loads and stores that the checker cannot follow.
        filename: what messages call a text.

    Raises:
        CompileError: g++ refuses it.
    """

    def __init__(
        self,
        source: source_text.Source,
        *,
        name_expressions: Sequence[str] = (),
        options: Sequence[str] = (),
        kind: Kind = "fast",
        order: Order = "forward",
        check_races: bool = True,
        filename: str = "kernel.cu",
    ) -> None:
        text = source_text.read(source, filename)
        self.kind, self.order, self.check_races = kind, order, check_races
        self._files = source_text.files(text)
        self.entries = {entry.name: entry for entry in source_text.entries(text)}
        self.name_expressions = tuple(name_expressions)
        self._build = toolchain.build(
            text, kind, name_expressions=self.name_expressions, options=options
        )
        self._library = _load(str(self._build.library), tuple(self._build.variables))
        orders = {"forward": (0, 0), "reverse": (1, 0)}
        self._options = _Options(
            *(orders[order] if isinstance(order, str) else (2, order)), check_races
        )

    def shared_bytes_of(self, name: str) -> int:
        """Bytes of the `__shared__` variables of a kernel, and of functions that it may call.

        These are in its own file or in a header.
        """
        others = self.entries.keys() - {name}
        foreign = [
            text for file, text in self._files if file.endswith(".cu") and f" {name}(" not in text
        ]

        def is_counted(function: str) -> bool:
            template = function.partition("(")[0].partition("<")[0]
            return function not in others and not any(f" {template}(" in text for text in foreign)

        shared = [v for v in self._build.variables if v.shared]
        return sum(v.size for v in shared if is_counted(v.name.split("::")[0]))

    def get_function(self, name: str) -> HostKernel:
        """The kernel of that name, or the instance that a name expression asked for."""
        if name in self.name_expressions:
            return HostKernel(self, name, toolchain.symbol(name), 1024)
        if name not in self.entries:
            known = [*self.entries, *self.name_expressions]
            raise KeyError(f"no kernel {name!r}; there are {known}")
        return HostKernel(self, name, name, self.entries[name].max_threads)

    def _set_buffers(self, args: Sequence[Any]) -> None:
        if self.kind == "fast":  # it judges no access
            return
        self._library.host_clear_buffers()
        for s in merged([*spans_in(args), *registered_spans()]):
            self._library.host_add_buffer(s.address, s.size, s.read_only, s.name.encode())


class HostKernel:
    """One kernel of a module.

    Attributes:
        parameters: from its C++ signature.
        max_threads_per_block: of `__launch_bounds__`.
        max_dynamic_shared_size_bytes: raise it, as in CuPy, to launch with more than 48 KiB.
    """

    def __init__(self, module: HostModule, name: str, symbol: str, max_threads: int) -> None:
        self.module, self.name, self.max_threads_per_block = module, name, max_threads
        self.shared_bytes = module.shared_bytes_of(name)
        self.max_dynamic_shared_size_bytes = SHARED_BYTES - self.shared_bytes
        self._entry = _Kernel.in_dll(module._library, f"host_kernel_{symbol}")
        self.parameters = [
            Parameter(p.size, p.kind.decode(), p.pointee_size, p.pointee_kind.decode().strip("\0"))
            for p in self._entry.parameters[: self._entry.num_parameters]
        ]

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
    ) -> None:
        """Runs the whole grid before it returns.

        Args:
            grid: one to three sizes.
            block: one to three sizes.
            args: NumPy arrays and CPU tensors of any dtype, virtual buffers, addresses (Python int)
                and NumPy scalars of the parameter's exact type.
            shared_mem: bytes of dynamic shared memory.

        Raises:
            ArgumentError: an argument is not what the kernel reads.
            LaunchError: a GPU would refuse this grid, block or shared memory; or the grid is empty.
            KernelError: the kernel went wrong.
        """
        grid3, block3 = self._sizes(grid), self._sizes(block)
        self._check_limits(block3, shared_mem)
        packed = pack(self.name, self.parameters, args)
        module, library = self.module, self.module._library
        module._set_buffers(args)
        if library.host_launch(
            ctypes.byref(self._entry),
            packed.pointers,
            grid3,
            block3,
            shared_mem,
            ctypes.byref(module._options),
        ):
            self._raise()

    def check(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        """Checks a launch as a call does, and runs nothing; arrays may lie on any device.

        Raises:
            ArgumentError, LaunchError: as in a call.
        """
        self._sizes(grid)
        self._check_limits(self._sizes(block), shared_mem)
        check(self.name, self.parameters, args)

    def _sizes(self, sizes: Sequence[int]) -> Any:
        three = [*sizes, 1, 1, 1][: max(3, len(sizes))]
        if len(three) > 3 or any(not 0 <= n < 1 << 31 for n in three):
            raise LaunchError(f"{self.name}: sizes {tuple(sizes)}")
        return (ctypes.c_uint * 3)(*three)

    def _check_limits(self, block: Sequence[int], shared_mem: int) -> None:
        threads, allowed = block[0] * block[1] * block[2], self.max_threads_per_block
        if threads > allowed:
            raise LaunchError(f"{self.name}: {threads} threads a block, {allowed} allowed")
        bytes_left = MAX_SHARED_BYTES - self.shared_bytes
        # `shared_bytes` counts functions that this kernel may not call; NVRTC's test knows its own.
        limit = max(min(self.max_dynamic_shared_size_bytes, bytes_left), 0)
        if not 0 <= shared_mem <= limit:
            raise LaunchError(f"{self.name}: {shared_mem} bytes of shared memory, {limit} allowed")

    def _raise(self) -> None:
        number = ctypes.c_int()
        text = self.module._library.host_error(ctypes.byref(number)).decode()
        message = f"{self.name}: {toolchain.places(self.module._build.library, text)}"
        raise KERNEL_ERRORS.get(number.value, LaunchError)(message)


@functools.cache
def _load(path: str, variables: tuple[toolchain.Variable, ...]) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    flag, text = ctypes.c_int, ctypes.c_char_p
    library.host_error.restype = text
    library.host_add_buffer.argtypes = [pointer, size, flag, text]
    library.host_add_variable.argtypes = [size, size, flag, text]
    library.host_launch.argtypes = [pointer, pointer, pointer, pointer, size, pointer]
    for v in variables:
        library.host_add_variable(v.offset, v.size, v.shared, v.name.encode())
    return library
