"""Pack arguments as CuPy does, and compare them with the kernel's own C++ signature."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ArgumentError
from .memory import Span, VirtualBuffer, address_of, is_tensor, spans_of

_ARRAYS = np.ndarray | VirtualBuffer
_SCALARS = bool | int | float
_PACKED_BYTES = 16  # of each value; none is larger

_KINDS = {"i": "int", "u": "unsigned int", "f": "float", "s": "struct", "p": "pointer", "v": "void"}
# For each kind of parameter: the kinds of NumPy dtypes that it can be packed from.
_DTYPES = {"i": "i", "u": "ub", "f": "f"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel, as g++ sees it."""

    size: int  # bytes
    kind: str  # see abi.h
    pointee_size: int  # bytes
    pointee_kind: str

    def __str__(self) -> str:
        if self.kind == "p":
            return f"pointer to {_named(self.pointee_kind, self.pointee_size)}"
        return _named(self.kind, self.size)


@dataclass(frozen=True)
class Packed:
    """The arguments of a launch."""

    pointers: Any  # void*[n], each to a value
    values: Any  # keeps the values alive


def pack(kernel: str, parameters: Sequence[Parameter], args: Sequence[Any]) -> Packed:
    """Packs `args` for a launch.

    Raises:
        ArgumentError: their number, or the size or kind of one, is not what the kernel reads.
    """
    packed = [
        (address_of(arg).to_bytes(8, "little") if scalar is None else scalar).ljust(
            _PACKED_BYTES, b"\0"
        )
        for scalar, arg in zip(check(kernel, parameters, args), args, strict=True)
    ]
    values = ctypes.create_string_buffer(b"".join(packed))
    first = ctypes.addressof(values)
    places = range(first, first + len(args) * _PACKED_BYTES, _PACKED_BYTES)
    return Packed((ctypes.c_void_p * max(len(args), 1))(*places), values)


def spans_in(args: Sequence[Any]) -> list[Span]:
    """What the arrays among the arguments cover."""
    arrays = ((i, arg) for i, arg in enumerate(args) if _is_array(arg))
    return [span for i, array in arrays for span in spans_of(array, f"argument {i}")]


def check(kernel: str, parameters: Sequence[Parameter], args: Sequence[Any]) -> list[bytes | None]:
    """Checks arguments as `pack` does; arrays may lie on any device.

    Returns:
        The bytes of each scalar, None for arrays.

    Raises:
        ArgumentError: as in `pack`.
    """
    if len(args) != len(parameters):
        raise ArgumentError(f"{kernel} takes {len(parameters)} arguments, {len(args)} were given")
    scalars: list[bytes | None] = []
    for i, (arg, parameter) in enumerate(zip(args, parameters, strict=True)):
        try:
            if _is_array(arg):
                _check_array(parameter, arg)
                scalars.append(None)
            else:
                scalars.append(_scalar(parameter, arg))
        except ArgumentError as error:
            raise ArgumentError(f"{kernel}, argument {i}: {error}") from None
    return scalars


def _is_array(arg: Any) -> bool:
    return isinstance(arg, _ARRAYS) or is_tensor(arg)


def _named(kind: str, size: int) -> str:
    return "void" if kind == "v" else f"{_KINDS[kind]} of {size} bytes"


def _check_array(parameter: Parameter, arg: Any) -> None:
    if parameter.kind != "p":
        raise ArgumentError(f"the kernel takes {parameter}, an array was given")
    # Bytes, 16-bit floats by their bits, and vectors may hold anything.
    if isinstance(arg, VirtualBuffer) or parameter.pointee_kind not in _DTYPES:
        return
    if parameter.pointee_size < 4:
        return
    kind, size = _element(arg)
    if (kind == "f") != (parameter.pointee_kind == "f") or size != parameter.pointee_size:
        raise ArgumentError(f"the kernel takes {parameter}, a {arg.dtype} array was given")


def _element(arg: Any) -> tuple[str, int]:
    if isinstance(arg, np.ndarray):
        return arg.dtype.kind, arg.dtype.itemsize
    return ("f" if arg.is_floating_point() else "i"), arg.element_size()


def _scalar(parameter: Parameter, arg: Any) -> bytes:
    """Bytes of a NumPy scalar; a Python int counts as int64 or as an address, as in CuPy."""
    value = arg
    if isinstance(arg, _SCALARS) and not isinstance(arg, np.generic):
        value = {bool: np.bool_, int: np.int64, float: np.float64}[type(arg)](arg)
    if not isinstance(value, np.generic):
        raise ArgumentError(f"the kernel takes {parameter}, a {type(arg).__name__} was given")
    wanted = "iu" if parameter.kind == "p" else _DTYPES.get(parameter.kind, "")
    if value.dtype.kind not in wanted or value.dtype.itemsize != parameter.size:
        raise ArgumentError(f"the kernel takes {parameter}, {arg!r} is packed as {value.dtype}")
    return value.tobytes()
