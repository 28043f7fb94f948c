"""`Parcel` and `TakeIn`: what the transports need of both sides; and `save`, `load`: a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from specpool.engine.transfer.image import (
    FIXED_BYTES,
    Bytes,
    Told,
    Wait,
    header_bytes,
    parse_header,
)
from specpool.engine.transfer.layout import Layout
from specpool.errors import TransferError


class TakeIn(Protocol):
    """What a receiver calls with each image, such as `Engine.take_in` returns."""

    def __call__(self, image: Bytes, wait: Wait | None = None) -> Callable[[], None]:
        """Take an image in, and return a function that undoes it; raise what is refused.

        Args:
            image: uint8 [n], which is not kept.
            wait: must be called before a run of pages is read, if the sender still writes them;
                see `Image`. None if the image is whole.
        """


class Parcel(Protocol):
    """A row on its way out, such as `specpool.engine.moving.moves.Export`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the image."""

    def write(self, image: Bytes, told: Told | None = None) -> None:
        """Write the image, uint8 [num_bytes], and call `told` for each run: see `Writer.write`."""

    def arrived(self) -> None:
        """Give the row up: the other side has it."""

    def give_back(self) -> None:
        """Take the row back; after `arrived` do nothing."""


def save(parcel: Parcel, path: str | os.PathLike[str]) -> None:
    """Write a row to a file, which is there whole or not at all; the row stays with its owner.

    Raises:
        OSError: the file cannot be written. The old one stands.
    """
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    image = np.empty(parcel.num_bytes, np.uint8)
    parcel.write(image)
    try:
        with part.open("wb") as file:
            file.write(image.data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], layout: Layout) -> Bytes:
    """Read the image of a row that `save` has written, uint8 [n].

    The header is checked before memory is taken for the rest.

    Raises:
        TransferError: the file is not an image of a row that fits `layout`.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        head = file.read(FIXED_BYTES)
        head += file.read(header_bytes(head))
        total = parse_header(head, layout)[1].total
        size = os.fstat(file.fileno()).st_size
        if size != total:
            raise TransferError(f"{path} has {size} bytes, its header says {total}")
        image = np.empty(total, np.uint8)
        image[: len(head)] = np.frombuffer(head, np.uint8)
        if file.readinto(image[len(head) :].data) != total - len(head):
            raise TransferError(f"{path} has become shorter while it was read")
    return image
