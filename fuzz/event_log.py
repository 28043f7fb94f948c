"""The bytes of an event log, as `specpool replay` and `specpool inspect` read them.

The first byte of an input says how it is read. If it is even, the rest is the file. If it is odd,
the checksums are corrected first, so that the code behind them is reached. The law: a log is
replayed to its end or refused by one `RecordError`, in bounded memory.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from border import REFUSALS

from specpool.record.film import Film, slots

MAGIC = b"\x89SPLOG\r\n"
MASK, START, FACTOR = (1 << 64) - 1, 0x73706563706F6F6C, 0x9E3779B97F4A7C15
#: Events of one input that are looked at; pictures cost more than events.
MOST_EVENTS, PICTURE_EVERY = 400, 16
PATH = Path(tempfile.gettempdir()) / f"specpool-fuzz-{os.getpid()}.log"


def _word(state: int, value: int) -> int:
    mixed = ((state ^ (value & MASK)) * FACTOR) & MASK
    return mixed ^ (mixed >> 32)


def _over(state: int, data: bytes) -> int:
    whole = len(data) // 8 * 8
    for at in range(0, whole, 8):
        state = _word(state, int.from_bytes(data[at : at + 8], "little"))
    return _word(_word(state, int.from_bytes(data[whole:], "little")), len(data))


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 63:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            break
    return value, at


def with_checksums(data: bytes) -> bytes:
    """The same log with the checksums that its bytes should have (docs/event_log.md)."""
    made = bytearray(data)
    version, at = _number(data, len(MAGIC))
    length, at = _number(data, at)
    digest, state = START, _over(_word(START, version), data[at : at + length])
    at += length
    made[at : at + 4] = (state & 0xFFFFFFFF).to_bytes(4, "little")
    at += 4
    while at < len(data):
        length, at = _number(data, at)
        end = at + length
        if end + 12 > len(data):
            break
        after = int.from_bytes(data[end : end + 8], "little")
        state = _word(_word(_over(START, data[at:end]), digest), after)
        made[end + 8 : end + 12] = (state & 0xFFFFFFFF).to_bytes(4, "little")
        digest, at = after, end + 12
    return bytes(made)


def one_input(data: bytes) -> int:
    """Read a log.

    Returns:
        The events that were played.
    """
    log = data[1:]
    PATH.write_bytes(with_checksums(log) if data[:1] and data[0] % 2 else log)
    events = 0
    try:
        film = Film(PATH)
        while events < MOST_EVENTS and (event := film.advance()) is not None:
            str(event.text)
            events += 1
            if events % PICTURE_EVERY == 1:
                picture = film.picture()
                for row in picture.rows[:4]:
                    for at in range(len(picture.groups)):
                        slots(row, at, film.ledger.groups[at], film.ledger.shapes)
    except REFUSALS:
        pass
    finally:
        PATH.unlink(missing_ok=True)
    return events
