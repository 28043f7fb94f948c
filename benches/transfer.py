"""`python -m benches transfer`: a row moves to other pages, beside a copy of its bytes."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benches.loading import checked_loading
from specpool._core import Group, Ledger, Shape
from specpool.arrays import Int32
from specpool.checks import check_int
from specpool.cli.options import checks
from specpool.cli.options.groups import PlaceOptions
from specpool.cli.results import Result, interleaved, machine, report
from specpool.engine.transfer.image import Bytes, Image, Run, Told, Wait, Writer
from specpool.engine.transfer.layout import Layout
from specpool.engine.transfer.parcel import load, save
from specpool.engine.transfer.shared_memory import SharedMemoryReceiver, SharedMemorySender, send
from specpool.errors import CorruptState

if TYPE_CHECKING:
    from specpool.capacity.layer_kv import LayerKV
    from specpool.engine.memory.kv_cache import KVCache

_MIB = 1 << 20


class Side:
    """A ledger with room for one row, and pages of a pair's shape."""

    def __init__(
        self, layers: list[LayerKV], num_target: int, num_tokens: int, page_size: int, device: str
    ) -> None:
        """Lay the pages out as an engine does: the target's layers, then the drafter's."""
        import torch

        from specpool.engine.memory.kv_cache import KVCache
        from specpool.engine.memory.page_bytes import PageBytes

        num_pages = 2 * (-(-num_tokens // page_size) + 2)
        groups = [Group("target", page_size=page_size, num_pages=num_pages)]
        group_of_layer = [0] * num_target + [1] * (len(layers) - num_target)
        if len(layers) > num_target:
            groups.append(
                Group("draft", page_size=page_size, num_pages=num_pages, hosts_drafts=True)
            )
        self.ledger = Ledger(
            groups, [Shape.none()], num_rows=2, max_context_len=num_tokens + page_size
        )
        self.cache: KVCache = KVCache(
            self.ledger, layers, group_of_layer, dtype=torch.float32, device=torch.device(device)
        )
        self.pages = PageBytes(self.ledger, self.cache)
        self.layout = Layout.from_ledger(self.ledger, self.pages.page_bytes, "bench")
        self.tokens = list(range(num_tokens))

    def fill(self, num_tokens: int) -> int:
        """Return a row of random KV."""
        rng = np.random.default_rng(0)
        row = self.ledger.import_row(num_tokens, num_tokens)
        for g, size in enumerate(self.pages.page_bytes):
            pages = self.held(g, row)
            self.pages.write(g, pages, rng.integers(0, 256, size * len(pages), np.uint8))
        return row

    def held(self, group: int, row: int) -> Int32:
        """Return the row's pages, int32 [n]."""
        table: Int32 = self.ledger.page_table(group)[row]
        held: Int32 = table[table > 0]
        return held

    def take_in(self, data: Bytes, wait: Wait | None = None) -> int:
        """Check an image, take a row for it and write its pages."""
        image = Image(data, self.layout, wait)
        row = self.ledger.import_row(image.header.length, image.header.drafted_len)
        held = [self.held(g, row) for g in range(len(self.layout.groups))]

        def write(run: Run, of_run: Bytes) -> int:
            pages = held[run.group][run.page_slice]
            return self.pages.write(run.group, pages, of_run)

        image.read(write)
        return row


class Parcel:
    """A row on its way out."""

    def __init__(self, side: Side, row: int) -> None:
        """Export the row."""
        ledger = side.ledger
        self._side, self._prefix = side, ledger.export(row)
        length = ledger.prefix_len(self._prefix)
        groups = range(len(side.layout.groups))
        self._pages = [ledger.prefix_pages(self._prefix, g)[1] for g in groups]
        self._writer = Writer(
            side.layout, length=length, drafted_len=length, tokens=side.tokens, state={}
        )
        self.num_bytes = self._writer.num_bytes

    def write(self, image: Bytes, report: Told | None = None) -> None:
        """Write the image."""
        self._writer.write(image, self._read, report)

    def _read(self, run: Run, out: Bytes) -> int:
        pages = self._pages[run.group][run.page_slice]
        return self._side.pages.read(run.group, pages, out)

    def arrived(self) -> None:
        """Give the pages up."""
        self._side.ledger.release_prefix(self._prefix)

    def give_back(self) -> None:
        """Do nothing: a bench sends what it has."""


class Move:
    """A row that goes to and fro between two sides, and the ways that it may go."""

    def __init__(self, here: Side, there: Side, num_tokens: int, folder: str) -> None:
        """Begin with a row on the first side, and a receiver in `folder`."""
        self._here, self._there = here, there
        parcel = Parcel(here, here.fill(num_tokens))
        self.num_bytes = parcel.num_bytes
        self._image = np.empty(parcel.num_bytes, np.uint8)
        parcel.write(self._image)
        parcel.arrived()
        self._row = here.take_in(self._image)
        self._copy = np.empty_like(self._image)
        self._arrived: list[int] = []
        self._path = Path(folder) / "rows"
        self._receiver = SharedMemoryReceiver(self._take_in, there.layout, self._path)
        self._line = SharedMemorySender(self._path)

    def close(self) -> None:
        """End the connection."""
        self._line.close()
        self._receiver.close()

    def memcpy(self) -> float:
        """Seconds of one copy of the image between two buffers."""
        start = time.perf_counter()
        self._copy[:] = self._image
        return time.perf_counter() - start

    def new_memory(self) -> float:
        """Seconds of one copy of the image into shared memory that is new."""
        start = time.perf_counter()
        descriptor = os.memfd_create("specpool-bench")
        try:
            os.ftruncate(descriptor, self.num_bytes)
            with mmap.mmap(descriptor, self.num_bytes) as memory:
                memory[:] = self._image.data
        finally:
            os.close(descriptor)
        return time.perf_counter() - start

    def shared_memory(self) -> float:
        """Seconds of a move over a connection that stays, with the checks of both sides."""
        start = time.perf_counter()
        self._line.send(Parcel(self._here, self._row))
        return self._swapped(start, self._arrived.pop())

    def first_row(self) -> float:
        """Seconds of a move over a new connection, whose memory is new."""
        start = time.perf_counter()
        send(Parcel(self._here, self._row), self._path)
        return self._swapped(start, self._arrived.pop())

    def _take_in(self, image: Bytes, wait: Wait | None = None) -> Callable[[], None]:
        side, row = self._there, self._there.take_in(image, wait)
        self._arrived.append(row)
        return lambda: side.ledger.abort(row)

    def file(self) -> float:
        """Seconds of a move through a file."""
        with tempfile.TemporaryDirectory() as folder:
            start, path = time.perf_counter(), Path(folder) / "row"
            parcel = Parcel(self._here, self._row)
            save(parcel, path)
            row = self._there.take_in(load(path, self._there.layout))
            parcel.arrived()
            return self._swapped(start, row)

    def _swapped(self, start: float, row: int) -> float:
        seconds = time.perf_counter() - start
        self._row, self._here, self._there = row, self._there, self._here
        return seconds

    def check(self) -> None:
        """Check that the row has the bytes that it began with.

        Raises:
            CorruptState: it has not.
        """
        parcel, image = Parcel(self._here, self._row), np.empty(self.num_bytes, np.uint8)
        parcel.write(image)
        parcel.arrived()
        if not np.array_equal(image, self._image):
            raise CorruptState("the row has other bytes than at the start")


def transfer(
    *,
    target: str,
    draft: str | None,
    num_tokens: int,
    page_size: int,
    repeats: int,
    device: str,
    threads: int,
    json: bool,
    plot: Path | None,
) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
        CorruptState: what arrives is not what went.
    """
    check_int("repeats", repeats, 1, 1 << 16)
    check_int("tokens", num_tokens, 8, 1 << 20)
    check_int("page_size", page_size, 1, 1 << 10)
    checks.check_place(device=device, threads=threads)
    place = PlaceOptions(threads=threads)  # the models stay on the CPU; `device` has the KV
    loading = checked_loading(target=target, draft=draft, shape=None, place=place, plot=plot)
    from specpool.engine.engine import Engine

    with Engine.from_pretrained(**loading, max_batch=1) as engine:
        of_target = list(engine.target.layer_kv)
        layers = of_target + ([] if engine.drafter is None else list(engine.drafter.layers))
    here, there = (Side(layers, len(of_target), num_tokens, page_size, device) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        move = Move(here, there, num_tokens, folder)
        runs = [move.memcpy, move.new_memory, move.shared_memory, move.first_row, move.file]
        for run in runs * 2:
            run()  # warm up
        copy, new, memory, first, file = interleaved(runs, repeats)
        move.check()
        move.close()
    where, speed = f"{num_tokens:,} tokens, {move.num_bytes / _MIB:.1f} MiB", move.num_bytes / 2**30
    warm = ("GiB/s", "one memcpy between warm buffers", speed / copy)
    fresh = ("GiB/s", "one memcpy into new shared memory", speed / new)
    results = [
        Result(f"{where}: shared memory", speed / memory, *warm),
        Result(f"{where}: the first row of a connection", speed / first, *fresh),
        Result(f"{where}: a file and fsync", speed / file, *fresh),
    ]
    where_at = machine(device, threads, ("torch", "transformers"))
    report("bench transfer", where_at, results, json_only=json, plot=plot)
