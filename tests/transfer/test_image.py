"""Laws of a row as bytes: what is written is read; whatever else is given is one error."""

from __future__ import annotations

import json
import random
import struct

import numpy as np
import pytest

from parcel_kit import Parcel, Side
from specpool import TransferError
from specpool._core import checksum
from specpool.engine.transfer.image import (
    FIXED_BYTES,
    MAGIC,
    MAX_HEADER,
    MAX_STATE,
    VERSION,
    Header,
    Image,
    Places,
    most_bytes,
    parse_header,
)
from specpool.engine.transfer.layout import Layout
from specpool.engine.transfer.parcel import load, save

TOKENS = list(range(70))


def image_of(length: int = 23, seed: int = 1) -> tuple[Side, Parcel, np.ndarray, list[bytes]]:
    side = Side()
    row = side.fill(length, seed)
    content = side.content(row)
    parcel = Parcel(side, row, TOKENS[: length + 1])
    return side, parcel, parcel.image(), content


def with_header(image: np.ndarray, **changes: object) -> np.ndarray:
    """Return the image with another header, whose checksum is right."""
    (size,) = struct.unpack_from("<I", image, 12)
    header = json.loads(image[FIXED_BYTES : FIXED_BYTES + size].tobytes()) | changes
    text = json.dumps(header).encode()
    fixed = struct.pack(
        "<8sIIQ", MAGIC, VERSION, len(text), checksum(np.frombuffer(text, np.uint8))
    )
    rest = image[FIXED_BYTES + size :].tobytes()
    return np.frombuffer(fixed + text + rest, np.uint8)


def refused(side: Side, data: np.ndarray, match: str) -> None:
    before = side.ledger.state_hash(), side.ledger.digest
    with pytest.raises(TransferError, match=match) as caught:
        side.take_in(data)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert (side.ledger.state_hash(), side.ledger.digest) == before


@pytest.mark.parametrize("length", [1, 4, 8, 9, 23, 40, 63])
def test_what_is_written_is_read(length):
    _, parcel, image, content = image_of(length, seed=length)
    other = Side()
    other.ledger.admit()  # so that rows and pages differ
    other.take_in(image)
    (row,) = other.rows
    assert other.content(row) == content
    assert int(other.ledger.resolved_len[row]) == length
    assert int(other.ledger.drafted_len[row]) == length // 2
    read = Image(image, other.layout)
    assert (read.tokens, read.state) == (TOKENS[: length + 1], {"kind": "test"})
    parcel.arrived()
    parcel.side.check_empty()


def test_every_flipped_bit_is_found():
    """All bits of the head, of the sums and of some pages; the padding means nothing."""
    side, _, image, _ = image_of()
    rng = random.Random(5)
    places = parse_header(image[: FIXED_BYTES + MAX_HEADER].tobytes(), side.layout)[1]
    padding = range(places.checksums + 8 * (2 + places.num_runs), places.pages)
    bits = list(range(places.pages * 8)) + rng.sample(range(places.pages * 8, len(image) * 8), 2000)
    other = Side()
    before = other.ledger.state_hash()
    for bit in bits:
        if bit // 8 in padding:
            continue
        if bit == (places.checksums + 16) * 8:  # so far no row was taken
            assert other.ledger.state_hash() == before
        damaged = image.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TransferError):
            other.take_in(damaged)
    other.check_empty()


def test_every_truncation_is_found():
    _, _, image, _ = image_of(9)
    other = Side()
    for size in range(len(image)):
        with pytest.raises(TransferError):
            other.take_in(image[:size].copy())
    refused(other, np.concatenate([image, image[:1]]), f"has {len(image) + 1} bytes")
    other.check_empty()


def test_random_bytes_are_refused():
    rng = np.random.default_rng(3)
    other = Side()
    for _ in range(500):
        junk = rng.integers(0, 256, rng.integers(0, 300), np.uint8)
        with pytest.raises(TransferError):
            other.take_in(junk)
        behind = np.concatenate([np.frombuffer(MAGIC, np.uint8), junk])
        with pytest.raises(TransferError):
            other.take_in(behind)


CLAIMS = {
    "2^60 tokens with KV": ({"length": 1 << 60, "num_tokens": 1 << 60}, "must hold, got"),
    "more than the context": ({"length": 65, "num_tokens": 65}, "max_context_len is 64"),
    "a text beyond the context": ({"num_tokens": 1 << 30}, "max_context_len is 64"),
    "more draft KV than KV": ({"drafted_len": 24}, "must hold, got 24, 23"),
    "negative": ({"length": -1, "drafted_len": -1}, "must hold"),
    "a float": ({"length": 23.0}, "wrong type"),
    "a bool": ({"drafted_len": True}, "wrong type"),
    "a text": ({"num_tokens": "24"}, "wrong type"),
    "an unknown field": ({"pages": 1 << 60}, "cannot be read"),
    "a huge state": ({"state_bytes": 1 << 60}, "at most 67108864 bytes"),
    "another model": ({"layout_key": "0" * 32}, "models, weights, dtype"),
    "a shorter text": ({"length": 22}, "must have"),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_header_that_lies_is_refused_before_memory_is_taken(claim):
    changes, match = CLAIMS[claim]
    refused(Side(), with_header(image_of()[2], **changes), match)


def test_a_header_of_nested_lists_or_no_object_is_refused():
    image = image_of()[2]
    for text in (b"[" * 5000, b"[1]", b"{}", b"null", b"\xff\xff", b'{"length": 1}'):
        fixed = struct.pack(
            "<8sIIQ", MAGIC, VERSION, len(text), checksum(np.frombuffer(text, np.uint8))
        )
        refused(Side(), np.frombuffer(fixed + text + image.tobytes(), np.uint8), "cannot be read")
    other = image.copy()
    other[8] = 1
    refused(Side(), other, f"version 1, this specpool reads {VERSION}")
    other[12:16] = 255
    other[8] = VERSION
    refused(Side(), other, f"1 to {MAX_HEADER} bytes")


def test_another_page_size_is_another_layout():
    side, _, image, _ = image_of()
    other = Side()
    sizes = [group.page_bytes + 1 for group in side.layout.groups]
    other.layout = Layout.from_ledger(other.ledger, sizes, "model")
    refused(other, image, "page sizes must be equal")


def test_a_half_written_image_is_none():
    """A sender that dies while it writes leaves no magic."""
    side = Side()
    parcel = Parcel(side, side.fill(23, 1), TOKENS[:24])
    image = np.zeros(parcel.num_bytes, np.uint8)
    written = []

    def dies(run, out) -> int:
        written.append(run)
        if len(written) == 2:
            raise KeyboardInterrupt
        return 0

    with pytest.raises(KeyboardInterrupt):
        parcel.writer.write(image, dies)
    refused(Side(), image, "an image of a row with")
    parcel.give_back()
    side.check_empty()


def test_a_file_has_the_row_whole_or_not_at_all(tmp_path):
    _, parcel, image, content = image_of()
    path = tmp_path / "row"
    save(parcel, path)
    assert parcel.outcome is None and [p.name for p in tmp_path.iterdir()] == ["row"]
    other = Side()
    other.take_in(load(path, other.layout))
    assert other.content(other.rows[0]) == content
    for damage in (image[:-1], image[:10], np.concatenate([image, image])):
        path.write_bytes(damage.tobytes())
        with pytest.raises(TransferError):
            load(path, other.layout)
    path.write_bytes(image.tobytes())

    def fails(out) -> None:
        raise OSError("the disk is full")

    parcel.write = fails
    with pytest.raises(OSError, match="full"):
        save(parcel, path)
    assert path.read_bytes() == image.tobytes()
    with pytest.raises(OSError):
        load(tmp_path / "none", other.layout)


def test_no_image_is_larger_than_the_layout_says():
    layout = Side().layout
    for length in range(layout.max_context_len + 1):
        header = Header(layout.key, length, length, layout.max_context_len, MAX_STATE)
        assert Places(header, MAX_HEADER, layout).total <= most_bytes(layout)
