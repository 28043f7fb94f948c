"""A row as bytes: header, state, tokens, checksums and pages (docs/transfer.md).

```text
  0   magic 8 | version u32 | header bytes u32 | checksum of the header u64
  24  header: JSON, at most 64 KiB
      state: JSON of the session or request | tokens: int32 [n]
      checksums: u64 of state, tokens, and each run | padding to 64
      pages: group after group, a run is at most 1 MiB of whole pages of one group:
             the pages in the keys of the first layer, in its values, and so on;
             then the state slot, if there are recurrent layers
```

All numbers are little-endian. A reader knows from the length and its own layout how many bytes
there must be, so no count of a sender is trusted. The magic is written last, so readers reject a
partial image. A writer that reports its runs (`Told`) writes the magic first.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specpool._core import checksum
from specpool.checks import shown
from specpool.engine.transfer.layout import Layout
from specpool.errors import TransferError

Bytes = npt.NDArray[np.uint8]

MAGIC, VERSION = b"SPROWKV\0", 5
#: Called by a writer with the number of runs that are written; all before the pages is there.
Told = Callable[[int], None]
#: Called by a reader with a number of runs: returns when they are there, or raises `TransferError`.
Wait = Callable[[int], None]
_FIXED = struct.Struct("<8sIIQ")
FIXED_BYTES = _FIXED.size
MAX_HEADER = 64 << 10
#: Bytes of the state: the chat messages of a long conversation are the most of it.
MAX_STATE = 64 << 20
#: Bytes of a run. A reader begins when the first run is there: shorter runs let it begin earlier,
#: longer ones copy faster.
RUN_BYTES = 1 << 20
_ALIGNMENT = 64
_SUM = struct.Struct("<Q")
_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Run:
    """A run of whole pages of one group.

    Attributes:
        group: index into the layout's groups; the state slot is the page of one more.
        start: its first page, counted among the row's pages of the group.
        num_pages: pages.
        offset: of its first byte in the image.
        num_bytes: bytes of these pages.
    """

    group: int
    start: int
    num_pages: int
    offset: int
    num_bytes: int

    @property
    def page_slice(self) -> slice:
        """Where its pages are among the row's pages of the group."""
        return slice(self.start, self.start + self.num_pages)


@dataclass(frozen=True, slots=True)
class Header:
    """What an image begins with.

    Attributes:
        layout_key: `Layout.key` of the sender.
        length: tokens with KV.
        drafted_len: tokens with draft KV.
        num_tokens: all tokens of the text, `length` of them with KV.
        state_bytes: bytes of the state.
    """

    layout_key: str
    length: int
    drafted_len: int
    num_tokens: int
    state_bytes: int

    def encode(self) -> bytes:
        """Return the header's JSON."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()


class Places:
    """Where the parts of an image lie, for a header and a layout."""

    def __init__(self, header: Header, header_bytes: int, layout: Layout) -> None:
        """Compute all offsets; no page is touched."""
        self.state = FIXED_BYTES + header_bytes
        self.tokens = self.state + header.state_bytes
        self.checksums = self.tokens + 4 * header.num_tokens
        counts, page_bytes = layout.num_pages(header.length), layout.page_bytes
        # A model without attention has pages of no bytes.
        pages_per_run = [max(RUN_BYTES // max(size, 1), 1) for size in page_bytes]
        self.num_runs = sum(
            -(-n // max_pages) for n, max_pages in zip(counts, pages_per_run, strict=True)
        )
        end = self.checksums + 8 * (2 + self.num_runs)
        self.pages = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._counts, self._pages_per_run, self._page_bytes = counts, pages_per_run, page_bytes
        self.total = self.pages + sum(n * size for n, size in zip(counts, page_bytes, strict=True))

    def sum_of(self, run: int) -> int:
        """Return the offset of a run's checksum; that of the state and the tokens come first."""
        return self.checksums + _SUM.size * (2 + run)

    def runs(self) -> Iterator[Run]:
        """Yield the runs in order."""
        offset = self.pages
        for g, (count, max_pages) in enumerate(zip(self._counts, self._pages_per_run, strict=True)):
            for start in range(0, count, max_pages):
                n = min(max_pages, count - start)
                num_bytes = n * self._page_bytes[g]
                yield Run(g, start, n, offset, num_bytes)
                offset += num_bytes


class Writer:
    """Writes the image of one row."""

    def __init__(
        self,
        layout: Layout,
        *,
        length: int,
        drafted_len: int,
        tokens: Sequence[int],
        state: Mapping[str, Any],
    ) -> None:
        """Lay the image out.

        Args:
            layout: the sender's.
            length: tokens with KV; 0 = the text goes without.
            drafted_len: tokens with draft KV.
            tokens: the whole text.
            state: everything else, for JSON.

        Raises:
            TransferError: the state is too long.
        """
        self._state = json.dumps(state).encode()
        if len(self._state) > MAX_STATE:
            raise TransferError(f"the state has {len(self._state)} bytes, at most {MAX_STATE} move")
        self._tokens = np.asarray(tokens, "<i4")
        header = Header(layout.key, length, drafted_len, len(self._tokens), len(self._state))
        self._header = header.encode()
        self._places = Places(header, len(self._header), layout)

    @property
    def num_bytes(self) -> int:
        """Bytes of the image."""
        return self._places.total

    def write(
        self, image: Bytes, read: Callable[[Run, Bytes], int], told: Told | None = None
    ) -> None:
        """Write the image.

        Args:
            image: uint8 [num_bytes], written.
            read: copies the pages of a run into its bytes, and returns their checksum.
            told: called with 0 before the first run, and after each run with their number, so that
                a reader may begin before the writer has ended.
        """
        places = self._places
        image[:8] = 0  # no image until all is there
        self._write_head(image)
        magic = np.frombuffer(MAGIC, np.uint8)
        if told is not None:
            image[:8] = magic
            told(0)
        for num, run in enumerate(places.runs(), 1):
            run_sum = read(run, image[run.offset : run.offset + run.num_bytes])
            _SUM.pack_into(image.data, places.sum_of(num - 1), run_sum)
            if told is not None:
                told(num)
        image[:8] = magic

    def _write_head(self, image: Bytes) -> None:
        """Write everything but the magic, the pages and their checksums."""
        places, parts = self._places, (self._state, self._tokens.tobytes())
        for at, (offset, part) in enumerate(zip((places.state, places.tokens), parts, strict=True)):
            target = image[offset : offset + len(part)]
            target[:] = np.frombuffer(part, np.uint8)
            _SUM.pack_into(image.data, places.checksums + _SUM.size * at, checksum(target))
        image[places.sum_of(places.num_runs) : places.pages] = 0
        header = np.frombuffer(self._header, np.uint8)
        image[FIXED_BYTES : FIXED_BYTES + len(header)] = header
        fixed = _FIXED.pack(MAGIC, VERSION, len(header), checksum(header))
        image[8:FIXED_BYTES] = np.frombuffer(fixed[8:], np.uint8)


def most_bytes(layout: Layout) -> int:
    """Return a number of bytes that no image of this layout exceeds."""
    length = layout.max_context_len
    header = Header(layout.key, length, length, length, MAX_STATE)
    return Places(header, MAX_HEADER, layout).total + sum(layout.page_bytes)


def header_bytes(fixed: bytes) -> int:
    """Return the bytes of the header that follows the first `FIXED_BYTES` of an image.

    Raises:
        TransferError: these are not the first bytes of an image of this version.
    """
    if len(fixed) < FIXED_BYTES:
        raise TransferError(f"the image ends after {len(fixed)} bytes, its head has {FIXED_BYTES}")
    magic, version, size, _ = _FIXED.unpack(fixed[:FIXED_BYTES])
    if magic != MAGIC:
        raise TransferError(f"it begins with {magic!r}, an image of a row with {MAGIC!r}")
    if version != VERSION:
        raise TransferError(f"the image has version {version}, this specpool reads {VERSION}")
    if not 0 < size <= MAX_HEADER:
        raise TransferError(f"the header must have 1 to {MAX_HEADER} bytes, it claims {size}")
    return int(size)


def parse_header(head: bytes, layout: Layout) -> tuple[Header, Places]:
    """Read the head of an image: its first bytes and the header behind them.

    Returns:
        The header, and where everything lies; `Places.total` is the size that the image must have.

    Raises:
        TransferError: the header is damaged or wrong, or the row does not fit `layout`.
    """
    size = header_bytes(head)
    text = head[FIXED_BYTES : FIXED_BYTES + size]
    if len(text) < size:
        raise TransferError(f"the image ends in its header, after {len(head)} bytes")
    if checksum(np.frombuffer(text, np.uint8)) != _FIXED.unpack(head[:FIXED_BYTES])[3]:
        raise TransferError("the header is damaged: its checksum differs")
    header = _header(text)
    if header.layout_key != layout.key:
        raise TransferError(
            f"the row comes from a layout {header.layout_key:.32}, this engine's is {layout.key}: "
            "models, weights, dtype, drafter and page sizes must be equal"
        )
    if header.length > layout.max_context_len or header.num_tokens > layout.max_context_len:
        raise TransferError(
            f"the text has {header.num_tokens} tokens, {header.length} with KV; "
            f"this engine's max_context_len is {layout.max_context_len}"
        )
    return header, Places(header, size, layout)


def _header(text: bytes) -> Header:
    try:
        fields = json.loads(text)
        header = Header(**fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise TransferError(f"the header cannot be read: {error!s:.200}") from None
    names = ("length", "drafted_len", "num_tokens", "state_bytes")
    numbers = [getattr(header, name) for name in names]
    if not isinstance(header.layout_key, str) or any(type(n) is not int for n in numbers):
        raise TransferError(f"the header has values of a wrong type: {fields!r:.200}")
    length, drafted_len, num_tokens, state_bytes = numbers
    if not 0 <= drafted_len <= length <= num_tokens <= _INT32_MAX:
        raise TransferError(
            f"0 <= drafted_len <= length <= num_tokens must hold, got {drafted_len}, {length}, "
            f"{num_tokens}"
        )
    if not 0 <= state_bytes <= MAX_STATE:
        raise TransferError(f"the state must have at most {MAX_STATE} bytes, got {state_bytes}")
    return header


def _bytes_of(data: Bytes | bytes | bytearray | memoryview) -> Bytes:
    """Return an image as an array on the same memory, or raise `TransferError`."""
    try:
        image = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
    except (TypeError, ValueError, BufferError):
        raise TransferError(f"an image is bytes or uint8 [n], got {shown(data)}") from None
    if image.dtype != np.uint8 or image.ndim != 1:
        raise TransferError(f"an image is uint8 [n], got {image.dtype} {[*image.shape]}")
    return image


class Image:
    """An image whose head, state and tokens were checked; its pages are checked as they are read.

    Attributes:
        header: the header.
        state: what `Writer` was given.
        tokens: the whole text.
    """

    def __init__(
        self, data: Bytes | bytes | bytearray | memoryview, layout: Layout, wait: Wait | None = None
    ) -> None:
        """Check all but the pages. Copies no pages.

        Args:
            data: uint8 [n] or bytes, the whole image. Another process may write it, so it is read
                once.
            layout: the receiver's.
            wait: called before a run is read, if its writer has not ended yet.

        Raises:
            TransferError: it is not a whole image of a row that fits `layout`, or it is damaged.
        """
        data = _bytes_of(data)
        head = data[: FIXED_BYTES + MAX_HEADER].tobytes()
        self.header, places = parse_header(head, layout)
        if len(data) != places.total:
            raise TransferError(
                f"the image has {len(data)} bytes; for {self.header.length} tokens of this layout "
                f"it must have {places.total}"
            )
        self._data, self._places, self._wait = data, places, wait
        self.state = self._read_state(self._part("state", places.state, places.tokens, 0))
        text = self._part("tokens", places.tokens, places.checksums, 1)
        self.tokens: list[int] = np.frombuffer(text, "<i4").tolist()

    def _part(self, name: str, start: int, end: int, at: int) -> bytes:
        part = self._data[start:end].copy()
        if checksum(part) != self._sum(self._places.checksums + _SUM.size * at):
            raise TransferError(f"the {name} of the image is damaged: its checksum differs")
        return part.tobytes()

    @staticmethod
    def _read_state(text: bytes) -> dict[str, Any]:
        try:
            state = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TransferError(f"the state cannot be read: {error!s:.200}") from None
        if not isinstance(state, dict):
            raise TransferError(f"the state must be an object, got {type(state).__name__}")
        return state

    def read(self, write: Callable[[Run, Bytes], int]) -> None:
        """Read the pages, run by run.

        Args:
            write: copies the bytes of a run to its pages, and returns the checksum of what it has
                written.

        Raises:
            TransferError: a run is damaged. Discard the row that it was written to.
        """
        places = self._places
        for at, run in enumerate(places.runs()):
            if self._wait is not None:
                self._wait(at + 1)
            run_sum = write(run, self._data[run.offset : run.offset + run.num_bytes])
            if run_sum != self._sum(places.sum_of(at)):
                raise TransferError(
                    f"run {at} of {places.num_runs} of the image is damaged: its checksum differs"
                )

    def _sum(self, offset: int) -> int:
        return int(_SUM.unpack_from(self._data.data, offset)[0])
