"""The bytes of a row that moves, as a receiver reads them (docs/transfer.md).

The bits of an input's first byte say what is corrected in the rest, so that the code behind it is
reached: 1 the head, 2 the name of the layout, 4 the size, 8 the checksums. With 16 an engine reads
it, else a ledger with plain memory. With 32 the reader's window group has a sink. The law: an image
is taken in or refused by one error, in bounded memory, its pages are those of the row, and a
refused one leaves no row, no page and no session.
"""

from __future__ import annotations

import functools
import json
import struct

import numpy as np

from specpool import (
    ConfigError,
    Engine,
    Group,
    Ledger,
    OutOfPages,
    OutOfRows,
    Session,
    Shape,
    TransferError,
)
from specpool._core import checksum, scatter_pages
from specpool.engine.transfer.image import (
    FIXED_BYTES,
    MAGIC,
    VERSION,
    Bytes,
    Image,
    Run,
    parse_header,
)
from specpool.engine.transfer.layout import Layout
from specpool.testing import assert_no_page_leaked

HEAD, NAME, SIZE, SUMS, ENGINE, SINKS = 1, 2, 4, 8, 16, 32
PAGE_BYTES = (24, 10)
#: An image is not made longer than this.
MOST_BYTES = 1 << 16


class Side:
    """A ledger with plain memory."""

    def __init__(self, *, sinks: bool) -> None:
        groups = [
            Group("draft", page_size=4, num_pages=40, hosts_drafts=True),
            Group("window", page_size=2, num_pages=40, window=9, sink=3 if sinks else 0),
        ]
        self.ledger = Ledger(groups, [Shape.eagle(1, 1, 2)], num_rows=2, max_context_len=64)
        self.layout = Layout.from_ledger(self.ledger, PAGE_BYTES, "fuzz")
        self.memory = [np.zeros((41, size), np.uint8) for size in PAGE_BYTES]

    def take_in(self, data: Bytes) -> None:
        """Read an image, and write its pages."""
        image = Image(data, self.layout)
        if not image.header.length:
            return
        row = self.ledger.import_row(image.header.length, image.header.drafted_len)
        tables = [self.ledger.page_table(g)[row] for g in range(2)]
        held = [table[table > 0].astype(np.int32) for table in tables]
        assert [*map(len, held)] == self.layout.num_pages(image.header.length)

        def write(run: Run, of_run: Bytes) -> int:
            pages = held[run.group][run.page_slice]
            return scatter_pages([self.memory[run.group]], pages, of_run)

        try:
            image.read(write)
        finally:
            self.ledger.abort(row)
            self.ledger.check()
            assert [self.ledger.free_pages(g) for g in range(2)] == [40, 40]


@functools.cache
def side(sinks: bool) -> Side:
    return Side(sinks=sinks)


@functools.cache
def engine(sinks: bool) -> Engine:
    window = {"draft_window": 9, "draft_sink": 3} if sinks else {}
    return Engine.from_pretrained(
        draft="specpool/tiny-eagle", max_context_len=64, page_size=4, **window
    )


def corrected(data: bytes, how: int, layout: Layout) -> bytes:
    """The image with what the bits of `how` name made right, as far as it can be read."""
    end = data.find(b"}", FIXED_BYTES) + 1
    if not how & HEAD or not end:
        return data
    text, rest = data[FIXED_BYTES:end], data[end:]
    if how & NAME:
        try:
            text = json.dumps(json.loads(text) | {"layout_key": layout.key}).encode()
        except (ValueError, TypeError, RecursionError):
            pass
    sum_of_head = checksum(np.frombuffer(text, np.uint8))
    made = bytearray(struct.pack("<8sIIQ", MAGIC, VERSION, len(text), sum_of_head) + text + rest)
    try:
        places = parse_header(bytes(made), layout)[1]
    except TransferError:
        return bytes(made)
    if how & SIZE and places.total <= MOST_BYTES:
        made = made[: places.total].ljust(places.total, b"\0")
    if how & SUMS and len(made) == places.total:
        image = np.frombuffer(made, np.uint8)
        parts = [(places.state, places.tokens), (places.tokens, places.checksums)]
        parts += [(run.offset, run.offset + run.num_bytes) for run in places.runs()]
        sums = np.array([checksum(image[a:b]) for a, b in parts], "<u8").tobytes()
        made[places.checksums : places.checksums + len(sums)] = sums
    return bytes(made)


def one_input(data: bytes) -> int:
    """Read an image.

    Returns:
        1 if it was taken in.
    """
    how = data[0] if data else 0
    reader = (engine if how & ENGINE else side)(bool(how & SINKS))
    image = np.frombuffer(corrected(data[1:], how, reader.layout), np.uint8)
    if isinstance(reader, Engine):
        return of_engine(reader, image)
    try:
        reader.take_in(image)
    except (TransferError, OutOfPages, OutOfRows):
        return 0
    return 1


def of_engine(engine: Engine, image: Bytes) -> int:
    taken = 1
    try:
        imported = engine.import_row(image)
        if isinstance(imported, Session):
            imported.close()
        else:
            engine.turn()
            try:
                engine.abort(imported)
            except ConfigError:
                pass  # it has ended
    except (TransferError, ConfigError):
        taken = 0
    while engine.turn():
        pass
    assert not engine.core.scheduler.conversations.open
    engine.forget_prefixes()
    assert_no_page_leaked(engine.ledger)
    return taken


for has_sinks in (False, True):
    # It loads models, for which the seconds of an input are too few on a busy machine.
    engine(has_sinks)
