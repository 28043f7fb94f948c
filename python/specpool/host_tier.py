"""`HostTier`: the KV of retracted requests and idle sessions in host memory (spec 10).

A request's KV is in a row of the ledger or behind a `Handle` here; only while a reload's steps run
is it on its way. Target and draft travel together: a handle has pages in every group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch

from specpool._core import Ledger, Plan
from specpool.config import Offload
from specpool.copy_cost import CopyCost
from specpool.errors import ConfigError, CorruptState, NotReady, OrderError, OutOfPages, ShapeError
from specpool.host_group import HostGroup, Pages
from specpool.kv_cache import KVCache
from specpool.memory import free_bytes

# Of each group, in the copies that are timed at the start.
_TIMED_BYTES = 4 << 20
_NUM_TIMED = 4


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """KV on the host; good until it is dropped or reloaded.

    Attributes:
        number: of the handle, from 1.
        tag: of the row that it was.
        length: tokens; `resolved_len` of the row that it will be.
        drafted_len: draft KV is valid below it.
        last_start: where a reload's last extend begins at the earliest: from there on it evicts all
            that is not on the host.
        columns: of each group, the first column of the page table that is held.
        pages: of each group, the host pages of the columns from there on.
    """

    number: int
    tag: str | None
    length: int
    drafted_len: int
    last_start: int
    columns: tuple[int, ...]
    pages: tuple[Pages, ...]


@dataclass(frozen=True, slots=True)
class HostPoolStats:
    """Host pages of one group."""

    name: str
    page_bytes: int
    num_pages: int
    free_pages: int


@dataclass(frozen=True, slots=True)
class HostStats:
    """What a host tier holds now and has done.

    Attributes:
        groups: the groups' host pages.
        num_handles: requests and sessions on the host.
        offload_ct: rows that were taken over.
        reload_ct: handles that became rows again.
        drop_ct: handles that were dropped.
        full_ct: rows that were not taken over: too few host pages.
        unfit_ct: rows that were not taken over: a cut has left less of a window than any reload
            would.
        failed_ct: copies that failed, either way.
    """

    groups: tuple[HostPoolStats, ...]
    num_handles: int
    offload_ct: int
    reload_ct: int
    drop_ct: int
    full_ct: int
    unfit_ct: int
    failed_ct: int


class HostTier:
    """Host pages for every group of a ledger, and the way there and back.

    All copies are enqueued on torch's current stream, which is to be that of the forwards: pages
    are given back as soon as their copy is enqueued.
    """

    def __init__(
        self, ledger: Ledger, cache: KVCache, host_bytes: int, *, policy: Offload = "cost"
    ) -> None:
        """Take the memory, pinned where the device is a CUDA one, and time a few copies.

        Args:
            ledger: whose rows are offloaded; new, since pages of the cache are copied to the host
                and back to time it.
            cache: with the KV of all layers.
            host_bytes: for the host pages of all groups.
            policy: when `pays` says yes.

        Raises:
            ConfigError: the bytes do not hold one row of the whole context, or are not free.
        """
        self._ledger, self._cache, self._policy = ledger, cache, policy
        row_pages, page_bytes = self._row_pages(), self._page_bytes()
        row_bytes = sum(n * size for n, size in zip(row_pages, page_bytes, strict=True))
        if host_bytes < row_bytes:
            raise ConfigError(
                f"one row of {ledger.max_context_len} tokens needs {row_bytes} bytes on the host, "
                f"host_bytes is {host_bytes}: raise it, or lower max_context_len"
            )
        if host_bytes > (free := free_bytes(torch.device("cpu"))):
            raise ConfigError(f"host_bytes is {host_bytes}, {free} are free on the host: lower it")
        self._groups = [
            HostGroup(self._buffers(g), group.page_size, host_bytes * n // row_bytes)
            for g, (group, n) in enumerate(zip(ledger.groups, row_pages, strict=True))
        ]
        self._windows = [group.window for group in ledger.groups]
        self._handles: dict[int, Handle] = {}
        self._num_handles = 0
        self._offload_ct = self._reload_ct = self._drop_ct = 0
        self._full_ct = self._unfit_ct = self._failed_ct = 0
        self._out, self._back = self._timed()

    def offload(self, row: int) -> Handle | None:
        """Take over a quiet row: copy its KV to host pages and retract it.

        Returns:
            None where that cannot be, and nothing has changed: the host pages of a group do not
            hold it, its copy fails, it has no tokens, or a cut has left less of a window than any
            reload would. The caller then retracts the row, and its request is prefilled again.

        Raises:
            NotReady: something of the row is in flight (`Ledger.check_quiet`).
            ShapeError: the row is not admitted.
        """
        self._ledger.check_quiet(row)
        columns, num_pages = self._held(row)
        last_start = self._last_start(row)
        length = int(self._ledger.resolved_len[row])
        if last_start >= length:
            self._unfit_ct += length > 0
            return None
        if not self._fits(num_pages):
            self._full_ct += 1
            return None
        number = self._num_handles + 1
        handle = Handle(
            number,
            self._ledger.tag(row),
            length,
            min(int(self._ledger.drafted_len[row]), length),
            last_start,
            columns,
            tuple(g.take(n, number) for g, n in zip(self._groups, num_pages, strict=True)),
        )
        self._handles[number], self._num_handles = handle, number
        try:
            try:
                with self._watched(self._out, handle.pages):
                    self._save(row, handle)
            except Exception:
                self._failed_ct += 1
                self._give_back(handle)
                return None
            self._ledger.retract(row)
        except BaseException:
            self._give_back(handle)
            raise
        self._offload_ct += 1
        return handle

    def next_extend(self, handle: Handle, start: int) -> tuple[int, bool]:
        """The next step of a reload whose row has come to `start` tokens.

        Returns:
            `new_len` and `writes_draft` of its `prepare_extend`.
        """
        self._check(handle)
        if not 0 <= start < handle.length:
            raise ShapeError(f"start must be in [0, {handle.length}), got {start}")
        chunk_end = start + (self._ledger.max_chunk or handle.length)
        ends = (handle.length, handle.last_start, handle.drafted_len, chunk_end)
        return min(end for end in ends if end > start), start < handle.drafted_len

    def restore(self, plan: Plan, handles: Sequence[Handle]) -> None:
        """The forward of a launched step of reloads: fill the pages that its lanes have got.

        After the step's table delta and page copies. A handle whose row has come to its length is
        reloaded: its host pages are free.

        Args:
            plan: an extend; `next_extend` said how far each lane goes.
            handles: of its lanes.

        Raises:
            Exception: a copy failed. The handles are dropped: `abandon` the step, and prefill.
        """
        lanes = (plan.rows.tolist(), plan.start.tolist(), plan.new_len.tolist())
        for handle in handles:
            self._check(handle)
        try:
            for handle, row, start, end in zip(handles, *lanes, strict=True):
                self._load(handle, row, start, end)
        except BaseException:
            self._failed_ct += 1
            for handle in handles:
                self._give_back(handle)
            raise
        for handle, end in zip(handles, lanes[2], strict=True):
            if end == handle.length:
                self._give_back(handle)
                self._reload_ct += 1

    def reload(self, handle: Handle, tag: str | None = None) -> int | None:
        """Bring a handle back into a row of its own, at once; for a loop with nothing in flight.

        Returns:
            The row; or None, a copy has failed: the handle is dropped, the request is prefilled.

        Raises:
            NotReady: a step is in flight.
            OutOfRows: no row is free; the handle stays good.
            OutOfPages: a group has too few free pages for it; the handle stays good.
        """
        self._check(handle)
        if self._ledger.steps():
            raise NotReady(f"reload of {handle.tag}: step {self._ledger.steps()[0][0]} is not over")
        self._check_room(handle)
        row, start = self._ledger.admit(handle.tag if tag is None else tag), 0
        while start < handle.length:
            new_len, writes_draft = self.next_extend(handle, start)
            plan = self._ledger.prepare_extend([row], [new_len], writes_draft=writes_draft)
            self._ledger.launch(plan.step)
            try:
                self._cache.apply_delta(plan.step)
                self._cache.copy_pages(plan.page_copies)
                self.restore(plan, [handle])
            except Exception:
                self._give_back(handle)
                with suppress(RuntimeError):  # a device that is gone runs nothing more
                    self._synchronize()
                self._ledger.abandon(plan.step)
                return None
            finally:
                self._ledger.complete(plan.step)
            start = new_len
        return row

    def drop(self, handle: Handle) -> None:
        """Keep a handle's KV no longer.

        Raises:
            OrderError: it is not held any more.
        """
        self._check(handle)
        self._give_back(handle)
        self._drop_ct += 1

    def pays(self, row: int, token_seconds: float) -> bool:
        """Whether the row is worth offloading: by option, or cheaper there and back than prefilled.

        Args:
            row: to be retracted.
            token_seconds: of prefill, for each token.
        """
        if self._policy != "cost":
            return self._policy == "always"
        num_bytes = self._num_bytes(self._held(row)[1])
        seconds = self._out.seconds(num_bytes) + self._back.seconds(num_bytes)
        return seconds < int(self._ledger.resolved_len[row]) * token_seconds

    @property
    def handles(self) -> list[Handle]:
        """All that are held, the oldest first."""
        return list(self._handles.values())

    def stats(self) -> HostStats:
        """What it holds now and has done."""
        specs = self._ledger.groups
        return HostStats(
            tuple(
                HostPoolStats(spec.name, group.page_bytes, group.num_pages, group.num_free)
                for spec, group in zip(specs, self._groups, strict=True)
            ),
            len(self._handles),
            self._offload_ct,
            self._reload_ct,
            self._drop_ct,
            self._full_ct,
            self._unfit_ct,
            self._failed_ct,
        )

    def check(self) -> None:
        """Full audit of the host pages.

        Raises:
            CorruptState: the message is the report, one line for each broken invariant.
        """
        found = []
        for g, (spec, group) in enumerate(zip(self._ledger.groups, self._groups, strict=True)):
            held = {number: handle.pages[g] for number, handle in self._handles.items()}
            found += [f"group {spec.name}: {finding}" for finding in group.findings(held)]
        if found:
            raise CorruptState("\n".join(found))

    def close(self) -> None:
        """Drop what is held. Twice is once."""
        for handle in self.handles:
            self.drop(handle)

    # --- how it is done -------------------------------------------------------------------------

    def _row_pages(self) -> list[int]:
        """Pages of each group that a row of the whole context holds at most."""
        last = self._ledger.max_context_len - 1
        needs = self._ledger.pages_needed(last, last, 0).tolist()
        whole = [-(-(last + 1) // group.page_size) for group in self._ledger.groups]
        return [min(pair) for pair in zip(needs, whole, strict=True)]

    def _buffers(self, group: int) -> list[torch.Tensor]:
        """Keys and values of a group's layers, but for those without a byte."""
        layers = [i for i, g in enumerate(self._cache.layer_groups) if g == group]
        return [buffer for buffer in self._cache.buffers(layers) if buffer.numel()]

    def _page_bytes(self) -> list[int]:
        """Of each group: bytes of a page in all layers."""
        return [
            sum(b[0].numel() for b in self._buffers(g)) * size * self._cache.dtype.itemsize
            for g, size in enumerate(self._cache.page_sizes)
        ]

    def _num_bytes(self, num_pages: Sequence[int]) -> int:
        return sum(n * g.page_bytes for n, g in zip(num_pages, self._groups, strict=True))

    def _held(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of each group: the first column that the row holds, and how many have tokens."""
        length, sizes = int(self._ledger.resolved_len[row]), self._cache.page_sizes
        firsts = [int(self._ledger.evicted_len(g)[row]) // size for g, size in enumerate(sizes)]
        ends = [-(-length // size) for size in sizes]
        return tuple(firsts), tuple(b - a for a, b in zip(firsts, ends, strict=True))

    def _last_start(self, row: int) -> int:
        """From where an extend evicts all that the row has evicted; see `Handle`."""
        starts = [0]
        for g, window in enumerate(self._windows):
            evicted = int(self._ledger.evicted_len(g)[row])
            if window is not None and evicted:
                starts.append(evicted + window - 1)
        return max(starts)

    def _fits(self, num_pages: Sequence[int]) -> bool:
        """Whether every group has so many host pages, before any is taken."""
        return all(n <= g.num_free for n, g in zip(num_pages, self._groups, strict=True))

    def _save(self, row: int, handle: Handle) -> None:
        for g, (group, first) in enumerate(zip(self._groups, handle.columns, strict=True)):
            pages = handle.pages[g]
            group.save(self._ledger.page_table(g)[row, first : first + len(pages)], pages)

    def _load(self, handle: Handle, row: int, start: int, end: int) -> None:
        """Fill what the row holds of the slots `[start, end)`, in whole pages."""
        parts = []
        for group, first, pages in zip(self._groups, handle.columns, handle.pages, strict=True):
            to = -(-end // group.page_size)
            begin = min(max(start // group.page_size, first), to)
            parts.append((begin, to, pages[begin - first : to - first]))
        with self._watched(self._back, [part[2] for part in parts]):
            for g, (begin, to, pages) in enumerate(parts):
                self._groups[g].load(pages, self._ledger.page_table(g)[row, begin:to])

    @contextmanager
    def _watched(self, cost: CopyCost, pages: Sequence[Pages]) -> Iterator[None]:
        """Tell how long a copy of these host pages took, where the host waits for it anyway."""
        start = time.perf_counter()
        yield
        num_bytes = self._num_bytes([len(each) for each in pages])
        if num_bytes and self._cache.device.type == "cpu":
            cost.observe(num_bytes, time.perf_counter() - start)

    def _timed(self) -> tuple[CopyCost, CopyCost]:
        """What copies of a page, and of some, take to the host and back."""
        most = [
            min(g.num_pages, spec.num_pages, max(_TIMED_BYTES // g.page_bytes, 1))
            for g, spec in zip(self._groups, self._ledger.groups, strict=True)
        ]
        few = [1] * len(most)
        least = [[float("inf")] * 2, [float("inf")] * 2]  # seconds there and back, of few and most
        for _ in range(_NUM_TIMED):  # the first warms up
            for seconds, num_pages in zip(least, (few, most), strict=True):
                for way in (0, 1):
                    seconds[way] = min(seconds[way], self._time(num_pages, back=way == 1))
        sizes = self._num_bytes(few), self._num_bytes(most)
        out, back = (
            CopyCost(*((size, seconds[way]) for size, seconds in zip(sizes, least, strict=True)))
            for way in (0, 1)
        )
        return out, back

    def _time(self, num_pages: Sequence[int], *, back: bool) -> float:
        """Seconds of a copy of the first pages of each group; what they hold stays."""
        self._synchronize()
        start = time.perf_counter()
        for group, n in zip(self._groups, num_pages, strict=True):
            pages, device_pages = np.arange(n), np.arange(1, n + 1, dtype=np.int32)
            if back:
                group.load(pages, device_pages)
            else:
                group.save(device_pages, pages)
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._cache.device.type == "cuda":
            torch.cuda.synchronize(self._cache.device)

    def _check_room(self, handle: Handle) -> None:
        """Whether every group has the pages for a reload, before a row is taken."""
        most, start = [0] * len(self._groups), 0
        while start < handle.length:
            end, _ = self.next_extend(handle, start)
            for g, (group, window) in enumerate(zip(self._groups, self._windows, strict=True)):
                below = 0 if window is None else max(0, start - window + 1) // group.page_size
                most[g] = max(most[g], -(-end // group.page_size) - below)
            start = end
        for g, (spec, need) in enumerate(zip(self._ledger.groups, most, strict=True)):
            free, fenced = self._ledger.free_pages(g), self._ledger.fenced_pages(g)
            if need > free:
                reclaimable = self._ledger.reclaimable_pages(g)
                raise OutOfPages(
                    f"group {spec.name}: reload of {handle.tag} needs {need} pages, {free} free, "
                    f"{fenced} fenced, {reclaimable} reclaimable",
                    spec.name,
                    need,
                    free,
                    fenced,
                    reclaimable,
                )

    def _check(self, handle: Handle) -> None:
        if self._handles.get(handle.number) is not handle:
            raise OrderError(
                f"handle {handle.number} of {handle.tag} is not held: dropped or reloaded"
            )

    def _give_back(self, handle: Handle) -> None:
        if self._handles.pop(handle.number, None) is not None:
            for group, pages in zip(self._groups, handle.pages, strict=True):
                group.give_back(pages)
