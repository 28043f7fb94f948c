"""Pack arguments as CuPy does, and compare them with the kernel's own C++ signature."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ArgumentError
from .memory import Span, VirtualBuffer, address_of, is_tensor, spans_of

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
    values: list[Any]  # keeps the values alive
    spans: list[Span]


def pack(kernel: str, parameters: Sequence[Parameter], args: Sequence[Any]) -> Packed:
    """Packs `args` for a launch.

    Raises:
        ArgumentError: their number, or the size or kind of one, is not what the kernel reads.
    """
    values, spans = [], []
    for i, scalar in enumerate(check(kernel, parameters, args)):
        raw = scalar
        if raw is None:
            spans += spans_of(args[i], f"argument {i}")
            raw = np.uint64(address_of(args[i])).tobytes()
        values.append(ctypes.create_string_buffer(raw, 16))
    pointers = (ctypes.c_void_p * max(len(values), 1))(*[ctypes.addressof(v) for v in values])
    return Packed(pointers, values, spans)


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
        where = f"{kernel}, argument {i}"
        if isinstance(arg, np.ndarray | VirtualBuffer) or is_tensor(arg):
            _check_array(where, parameter, arg)
            scalars.append(None)
        else:
            scalars.append(_scalar(where, parameter, arg))
    return scalars


def _named(kind: str, size: int) -> str:
    return "void" if kind == "v" else f"{_KINDS[kind]} of {size} bytes"


def _check_array(where: str, parameter: Parameter, arg: Any) -> None:
    if parameter.kind != "p":
        raise ArgumentError(f"{where}: the kernel takes {parameter}, an array was given")
    # Bytes, 16-bit floats by their bits, and vectors may hold anything.
    if isinstance(arg, VirtualBuffer) or parameter.pointee_kind not in _DTYPES:
        return
    if parameter.pointee_size < 4:
        return
    kind, size = _element(arg)
    if (kind == "f") != (parameter.pointee_kind == "f") or size != parameter.pointee_size:
        raise ArgumentError(f"{where}: the kernel takes {parameter}, a {arg.dtype} array was given")


def _element(arg: Any) -> tuple[str, int]:
    if isinstance(arg, np.ndarray):
        return arg.dtype.kind, arg.dtype.itemsize
    return ("f" if arg.is_floating_point() else "i"), arg.element_size()


def _scalar(where: str, parameter: Parameter, arg: Any) -> bytes:
    """Bytes of a NumPy scalar; a Python int counts as int64 or as an address, as in CuPy."""
    value = arg
    if isinstance(arg, bool | int | float) and not isinstance(arg, np.generic):
        value = {bool: np.bool_, int: np.int64, float: np.float64}[type(arg)](arg)
    if not isinstance(value, np.generic):
        raise ArgumentError(
            f"{where}: the kernel takes {parameter}, a {type(arg).__name__} was given"
        )
    wanted = "iu" if parameter.kind == "p" else _DTYPES.get(parameter.kind, "")
    if value.dtype.kind not in wanted or value.dtype.itemsize != parameter.size:
        raise ArgumentError(
            f"{where}: the kernel takes {parameter}, {arg!r} is packed as {value.dtype}"
        )
    return value.tobytes()
