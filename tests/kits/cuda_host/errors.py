"""Errors of a launch on the host. Each error of a kernel knows its lines of the `.cu` file."""

from __future__ import annotations

import re

_PLACE = re.compile(r" at (\S+?):(\d+)")


class CompileError(RuntimeError):
    """g++ refused the kernel; the text is g++'s own."""


class ArgumentError(TypeError):
    """CuPy would pack an argument in a way that the kernel does not read."""


class LaunchError(ValueError):
    """A grid, block or shared memory that a GPU refuses; an empty grid (CuPy would run a block)."""


class KernelError(RuntimeError):
    """The kernel did something that CUDA does not allow.

    Attributes:
        places: (file, line) of every access that the text names, the reported thread's first.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.places = [(file, int(line)) for file, line in _PLACE.findall(text)]

    @property
    def line(self) -> int:
        """The reported thread's line in the `.cu` file, 0 if it is not known."""
        return self.places[0][1] if self.places else 0

    @property
    def lines(self) -> set[int]:
        """Every line that the text names: both sides of a race or of a divergence."""
        return {line for _, line in self.places}


class OutOfBoundsError(KernelError):
    """A load or store outside everything that the kernel was given, or (fast build) a crash."""


class ReadOnlyError(KernelError):
    """A store to an array that is not writeable."""


class MisalignedError(KernelError):
    """An access at an address that is not a multiple of its size."""


class RaceError(KernelError):
    """Two accesses, one a write, that nothing orders."""


class UninitialisedError(KernelError):
    """A load of shared memory that this block has not written."""


class DivergenceError(KernelError):
    """Threads at different barriers or collectives, or one that never completes."""


class LivelockError(KernelError):
    """Threads spin on a value that no running thread of the block will change."""


class UndefinedError(KernelError):
    """Signed overflow, division by zero, a shift too wide."""


class TrapError(KernelError):
    """`assert`, `__trap` or a `__builtin_assume` that is false."""


# Numbers and order as `Error` in runtime/runtime.h; 1 is a LaunchError.
KERNEL_ERRORS: dict[int, type[KernelError]] = dict(
    enumerate(
        [
            OutOfBoundsError,
            ReadOnlyError,
            MisalignedError,
            RaceError,
            UninitialisedError,
            DivergenceError,
            LivelockError,
            UndefinedError,
            TrapError,
        ],
        start=2,
    )
)
