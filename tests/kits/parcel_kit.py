"""A ledger and plain memory for rows that move, without a model."""

from __future__ import annotations

import numpy as np

from specpool import Group, Ledger, Shape
from specpool._core import checksum
from specpool.engine.transfer.image import Image, Run, Told, Wait, Writer
from specpool.engine.transfer.layout import Layout

GROUPS = [
    Group("draft", page_size=4, num_pages=40, hosts_drafts=True),
    Group("window", page_size=2, num_pages=40, window=9),
]
PAGE_BYTES = [96, 40]


class Side:
    """One process: a ledger, the bytes of its pages, and what has come in."""

    def __init__(self, num_rows: int = 4) -> None:
        self.ledger = Ledger(
            GROUPS, [Shape.eagle(1, 1, 2)], num_rows=num_rows, max_context_len=64, digest=True
        )
        self.layout = Layout.from_ledger(self.ledger, PAGE_BYTES, "model")
        self.memory = [
            np.zeros((group.num_pages + 1, size), np.uint8)
            for group, size in zip(GROUPS, PAGE_BYTES, strict=True)
        ]
        self.rows: list[int] = []

    def fill(self, length: int, seed: int) -> int:
        """Return a row of `length` tokens whose pages hold random bytes."""
        row = self.ledger.import_row(length, length // 2, f"row {seed}")
        random = np.random.default_rng(seed)
        for g, memory in enumerate(self.memory):
            for page in self.pages(g, row):
                memory[page] = random.integers(0, 256, memory.shape[1], np.uint8)
        return row

    def pages(self, group: int, row: int) -> list[int]:
        return [int(page) for page in self.ledger.page_table(group)[row] if page]

    def content(self, row: int) -> list[bytes]:
        return [memory[self.pages(g, row)].tobytes() for g, memory in enumerate(self.memory)]

    def take_in(self, data: np.ndarray, wait: Wait | None = None):
        """Take an image in, as an engine would; return what undoes it."""
        image = Image(data, self.layout, wait)
        row = self.ledger.import_row(image.header.length, image.header.drafted_len)

        def write(run: Run, of_run: np.ndarray) -> int:
            pages = self.pages(run.group, row)[run.page_slice]
            self.memory[run.group][pages] = of_run.reshape(run.num_pages, -1)
            return checksum(of_run)

        try:
            image.read(write)
        except BaseException:
            self.ledger.abort(row)
            raise
        self.rows.append(row)

        def undo() -> None:
            self.rows.remove(row)
            self.ledger.abort(row)

        return undo

    def check_empty(self) -> None:
        """Check that nobody holds a page or a row."""
        self.ledger.check()
        assert list(self.ledger.prefixes) == []
        assert [self.ledger.free_pages(g) for g in range(2)] == [40, 40]
        assert not any(self.ledger.is_live(row) for row in range(1, self.ledger.num_rows + 1))


class Parcel:
    """A row of a side on its way out."""

    def __init__(self, side: Side, row: int, tokens: list[int]) -> None:
        self.side, self.prefix = side, side.ledger.export(row)
        ledger = side.ledger
        self.pages = [ledger.prefix_pages(self.prefix, g)[1] for g in range(2)]
        self.writer = Writer(
            side.layout,
            length=ledger.prefix_len(self.prefix),
            drafted_len=ledger.prefix_drafted_len(self.prefix),
            tokens=tokens,
            state={"kind": "test"},
        )
        self.outcome: str | None = None

    @property
    def num_bytes(self) -> int:
        return self.writer.num_bytes

    def write(self, image: np.ndarray, told: Told | None = None) -> None:
        def read(run: Run, out: np.ndarray) -> int:
            pages = self.pages[run.group][run.page_slice]
            out[:] = self.side.memory[run.group][pages].reshape(-1)
            return checksum(out)

        self.writer.write(image, read, told)

    def image(self) -> np.ndarray:
        image = np.empty(self.num_bytes, np.uint8)
        self.write(image)
        return image

    def arrived(self) -> None:
        self._end("arrived")

    def give_back(self) -> None:
        if self.outcome is None:
            self._end("back")

    def _end(self, outcome: str) -> None:
        assert self.outcome is None
        self.outcome = outcome
        self.side.ledger.release_prefix(self.prefix)
