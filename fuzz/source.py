"""Read a byte string as choices, and make odd arguments from them.

Behind the end of the string all bytes are 0, so a shorter string is a simpler input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
#: Edges at which integers of 32 and 64 bits, signed and unsigned, and sizes of memory go wrong.
EDGES = (
    0,
    -1,
    1,
    2,
    255,
    4096,
    2**24,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**61,
    2**63 - 1,
    2**63,
    2**64,
    -(2**31),
    -(2**63),
)
DTYPES = ("i4", "i8", "f4", "f8", "u1", "u8", "?", ">i4", "O", "f2")
#: Sizes that cost no memory while another dimension is 0.
HUGE = (2**20, 2**31, 2**38, 2**40, 2**62)
#: Objects that are no valid argument of any function.
STRANGERS: tuple[Any, ...] = (
    None,
    "x",
    b"x",
    1.5,
    float("nan"),
    [],
    [[1], [2, 3]],
    {},
    object(),
    True,
    "\ud800",
)


class Source:
    """Choices read from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_empty(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at].ljust(count, b"\0")

    def rest(self) -> bytes:
        return self.take(max(0, len(self._data) - self._at))

    def below(self, count: int) -> int:
        """A number in [0, count), count at most 65,536."""
        return int.from_bytes(self.take(1 if count <= 256 else 2), "little") % max(1, count)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def is_rare(self, sixteenths: int) -> bool:
        """True in so many cases of 16; False behind the end."""
        return self.byte() % 16 >= 16 - sixteenths


def array(source: Source, dtype: str, shape: Sequence[int], maximum: int) -> np.ndarray[Any, Any]:
    """An array of small numbers in [-1, maximum], now and then with an edge among them."""
    count = int(np.prod(shape))
    seed = source.below(256)
    values = (
        np.random.default_rng(seed).integers(0, max(1, maximum), count)
        if seed
        else np.zeros(count, np.int64)
    )
    with np.errstate(all="ignore"):
        made = values.astype(dtype).reshape(shape)
        if dtype[0] == "f":
            made = (made / max(1, maximum)).astype(dtype)
        if made.size and source.is_rare(2):
            edge = (
                source.pick((-1, *EDGES))
                if dtype[0] != "f"
                else source.pick((np.nan, np.inf, -np.inf, -1.0, 1e38))
            )
            made.flat[source.below(min(made.size, 65536))] = (
                np.array(edge, object if dtype[0] != "f" else "f8").astype(dtype)
                if _fits(edge, dtype)
                else 0
            )
    return made


def _fits(edge: float, dtype: str) -> bool:
    if np.dtype(dtype).kind not in "iu":
        return True
    limits = np.iinfo(dtype)
    return limits.min <= edge <= limits.max


def spoiled(source: Source, made: np.ndarray[Any, Any]) -> Any:
    """The array with one thing about it changed: its dtype, its shape, its strides, its memory."""
    way = source.below(10)
    if way == 0:
        return made.astype(source.pick(DTYPES[:-2])) if made.dtype != object else made
    if way == 1:
        return made.ravel()
    if way == 2:
        return made[..., None]
    if way == 3 and made.ndim:  # a dimension of 0 beside one that is far too large
        shape = [*made.shape]
        shape[source.below(made.ndim)] = 0
        shape[source.below(made.ndim)] = source.pick(HUGE)
        try:
            return np.zeros(shape if 0 in shape else (0,), made.dtype)
        except ValueError:  # numpy itself has a limit, though the array would be empty
            return made
    if way == 4 and made.ndim:
        return made[..., ::-1]
    if way == 5 and made.ndim:
        return np.broadcast_to(made[:1], made.shape)
    if way == 6:
        return made.T
    if way == 7 and made.ndim:
        return made[source.below(3) :]
    if way == 8:
        made.flags.writeable = False
        return made
    return source.pick((*STRANGERS, made.tolist()))


def overlapping(source: Source, arrays: list[np.ndarray[Any, Any]]) -> None:
    """Let two of the arrays share memory, whatever their dtypes."""
    if len(arrays) < 2:
        return
    at, other = source.below(len(arrays)), source.below(len(arrays))
    first, second = arrays[at], arrays[other]
    if first.dtype == object or second.dtype == object or at == other:
        return
    memory = bytearray(max(first.nbytes, second.nbytes) + 16)
    for index, made in ((at, first), (other, second)):
        # Neither of numpy's two views knows the other: both are over bytes.
        shift = source.pick((0, 0, 4, 8)) if index == other else 0
        view = np.frombuffer(memory, made.dtype, made.size, shift).reshape(made.shape)
        view[...] = made
        arrays[index] = view
