"""The bytes of plain values: what ranks say to each other. Nothing in them can run code.

A value is None, a bool, an int, a float, a str, bytes, an int32 array [n], or a list or dict of
values. Tuples come back as lists. Each value is a tag of one byte and its content; lengths and
counts are uint32, little-endian.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from specpool.errors import RankError

#: The most lists and dicts within each other.
MAX_DEPTH = 12
#: The most bytes of an int.
_MAX_INT = 16
_NONE, _FALSE, _TRUE, _INT, _FLOAT, _TEXT, _BYTES, _ARRAY, _LIST, _DICT = b"NFTidsbalm"
_COUNT, _DOUBLE = struct.Struct("<I"), struct.Struct("<d")


def encode(value: Any) -> bytes:
    """Return the bytes of a value.

    Raises:
        RankError: a part of it is of another type, too deep or too large.
    """
    out = bytearray()
    _write(out, value, 0)
    return bytes(out)


def decode(data: bytes | memoryview) -> Any:
    """Return the value of these bytes; no more memory is taken than their length explains.

    Raises:
        RankError: they are no value, or more than one; the message has the byte.
    """
    reader = _Reader(data)
    value = reader.value(0)
    if reader.at != len(data):
        raise RankError(f"a value ends at byte {reader.at}, {len(data) - reader.at} bytes follow")
    return value


def _write(out: bytearray, value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise RankError(f"a value has more than {MAX_DEPTH} lists and dicts within each other")
    if value is None:
        out.append(_NONE)
    elif isinstance(value, bool):
        out.append(_TRUE if value else _FALSE)
    elif isinstance(value, int):
        size = value.bit_length() // 8 + 1
        if size > _MAX_INT:
            raise RankError(f"an integer takes {size} bytes, at most {_MAX_INT} are allowed")
        out += bytes((_INT, size)) + value.to_bytes(size, "little", signed=True)
    elif isinstance(value, float):
        out.append(_FLOAT)
        out += _DOUBLE.pack(value)
    elif isinstance(value, str):
        _write_bytes(out, _TEXT, value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes):
        _write_bytes(out, _BYTES, value)
    elif isinstance(value, np.ndarray) and value.dtype == np.int32 and value.ndim == 1:
        _write_bytes(out, _ARRAY, value.astype("<i4", copy=False).tobytes())
    elif isinstance(value, list | tuple):
        out.append(_LIST)
        out += _COUNT.pack(len(value))
        for item in value:
            _write(out, item, depth + 1)
    elif isinstance(value, dict):
        out.append(_DICT)
        out += _COUNT.pack(len(value))
        for key, item in value.items():
            _write(out, key, MAX_DEPTH)  # a key is no list
            _write(out, item, depth + 1)
    else:
        raise RankError(f"a {type(value).__name__} cannot be sent to another rank")


def _write_bytes(out: bytearray, tag: int, content: bytes) -> None:
    if len(content) >= 1 << 32:
        raise RankError(f"a value of {len(content)} bytes is too large to be sent")
    out.append(tag)
    out += _COUNT.pack(len(content)) + content


class _Reader:
    """Reads one value after the other."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self.at = memoryview(data), 0

    def value(self, depth: int) -> Any:
        start, tag = self.at, self._take(1)[0]
        if tag in (_NONE, _FALSE, _TRUE):
            return None if tag == _NONE else tag == _TRUE
        if tag == _INT:
            return self._int()
        if tag == _FLOAT:
            return _DOUBLE.unpack(self._take(8))[0]
        if tag in (_TEXT, _BYTES, _ARRAY):
            return self._content(tag)
        if tag not in (_LIST, _DICT):
            raise RankError(f"byte {start} is {tag}, which begins no value")
        if depth >= MAX_DEPTH:
            raise RankError(f"byte {start}: more than {MAX_DEPTH} lists and dicts are nested")
        (count,) = _COUNT.unpack(self._take(4))
        least = count if tag == _LIST else 2 * count  # each value takes a byte at least
        if least > len(self._data) - self.at:
            left = len(self._data) - self.at
            raise RankError(f"byte {start}: {count} values cannot be in the {left} bytes left")
        if tag == _LIST:
            return [self.value(depth + 1) for _ in range(count)]
        return dict(self._item(depth) for _ in range(count))

    def _item(self, depth: int) -> tuple[Any, Any]:
        start, key = self.at, self.value(MAX_DEPTH)
        if isinstance(key, np.ndarray):
            raise RankError(f"byte {start}: an array is no key")
        return key, self.value(depth + 1)

    def _int(self) -> int:
        (size,) = self._take(1)
        if not 0 < size <= _MAX_INT:
            raise RankError(f"byte {self.at - 1}: an integer of {size} bytes")
        return int.from_bytes(self._take(size), "little", signed=True)

    def _content(self, tag: int) -> Any:
        (size,) = _COUNT.unpack(self._take(4))
        start, content = self.at, self._take(size)
        if tag == _BYTES:
            return bytes(content)
        if tag == _ARRAY:
            if size % 4:
                raise RankError(f"byte {start}: {size} bytes are no int32 array")
            return np.frombuffer(content, "<i4").astype(np.int32)
        try:
            return str(content, "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise RankError(f"byte {start + error.start} is no UTF-8") from None

    def _take(self, size: int) -> memoryview:
        if size > len(self._data) - self.at:
            raise RankError(
                f"byte {self.at}: {size} bytes are announced, {len(self._data) - self.at} are left"
            )
        self.at += size
        return self._data[self.at - size : self.at]
