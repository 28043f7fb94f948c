"""Runs unchanged `.cu` kernels on the CPU, for tests: no GPU, no driver.

    module = HostModule(path, kind="check", order="reverse")
    kernel = module.get_function("move_rows_kernel")
    with register(*layers):
        kernel((n,), (256,), (pointer_table(layers), src, dst, np.int32(n)))

Modules, each on those before it: `errors`, `source` (text of a `.cu`), `toolchain` (g++, cache),
`memory` (what a kernel may touch), `arguments`, `module`. C++: `device/` is what a kernel sees,
Modules, each importing those before it: `errors`, `source` (text of a `.cu`), `toolchain` (g++,
cache), `memory` (what a kernel may touch), `arguments`, `module`. C++: `device/` is what a kernel
sees, `runtime/` runs it, `abi.h` is shared by both; `planted/` holds kernels with known bugs.
It does not replace a GPU run: speed, occupancy, graph capture, missing fences and the last bits of
floats are not seen. Blocks run one after another.
"""

from .errors import (
    ArgumentError,
    CompileError,
    DivergenceError,
    KernelError,
    LaunchError,
    LivelockError,
    MisalignedError,
    OutOfBoundsError,
    RaceError,
    ReadOnlyError,
    TrapError,
    UndefinedError,
    UninitialisedError,
)
from .memory import VirtualBuffer, address_of, pointer_table, register
from .module import HostKernel, HostModule
from .toolchain import unavailable

# Builds and orders that a kernel's test goes through; `check` is for small cases.
FAST = [("fast", "forward"), ("fast", "reverse"), ("fast", 7)]
CHECK = [("check", "forward"), ("check", "reverse"), ("check", 7)]

__all__ = [
    "CHECK",
    "FAST",
    "ArgumentError",
    "CompileError",
    "DivergenceError",
    "HostKernel",
    "HostModule",
    "KernelError",
    "LaunchError",
    "LivelockError",
    "MisalignedError",
    "OutOfBoundsError",
    "RaceError",
    "ReadOnlyError",
    "TrapError",
    "UndefinedError",
    "UninitialisedError",
    "VirtualBuffer",
    "address_of",
    "pointer_table",
    "register",
    "unavailable",
]
