"""`HostTier`: the KV of retracted requests and idle sessions on the host (docs/host.md).

A request's KV is in a row of the ledger or behind a `Handle` here; only while a reload's steps run
is it on its way. Target and draft travel together: a handle has pages in every group. `Copies`
decides where the pages lie and how they are copied. `copies.py` copies real memory; the simulator
has a stand-in whose copies fail at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specpool._core import Ledger, Plan
from specpool.config import Offload
from specpool.errors import CorruptState, OrderError, OutOfPages, ShapeError
from specpool.memory.host.pages import HostPages, Pages

#: Of each group: pages of the device, and as many host pages.
Moves = Sequence[tuple[npt.NDArray[np.int32], Pages]]


class Copies(Protocol):
    """Copies pages to the host and back, in the order of the forwards.

    Attributes:
        num_pages: host pages of each group.
        page_bytes: of each group.
    """

    num_pages: list[int]
    page_bytes: list[int]

    def save(self, moves: Moves) -> None:
        """Copy pages of the device to host pages."""

    def load(self, moves: Moves) -> None:
        """Copy host pages to pages of the device."""

    def seconds(self, num_pages: Sequence[int]) -> float:
        """How long so many pages of each group take, there and back."""


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """KV on the host; good until it is dropped, trimmed or reloaded.

    Attributes:
        number: of the handle, from 1.
        tag: of the row that it was.
        length: tokens; `resolved_len` of the row that it will be.
        drafted_len: draft KV is valid below it.
        last_start: the earliest start of a reload's last extend. An extend from there evicts all
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
    """Which rows are on the host, and the way there and back.

    Attributes:
        ledger: whose rows.
    """

    def __init__(self, ledger: Ledger, copies: Copies, *, policy: Offload = "cost") -> None:
        """Nothing is on the host; `policy` says when `pays` says yes."""
        self.ledger = ledger
        self._copies, self._policy = copies, policy
        self._pages = [HostPages(n) for n in copies.num_pages]
        self._sizes = [group.page_size for group in ledger.groups]
        self._windows = [group.window for group in ledger.groups]
        self._handles: dict[int, Handle] = {}
        self._num_handles = 0
        self._offload_ct = self._reload_ct = self._drop_ct = 0
        self._full_ct = self._unfit_ct = self._failed_ct = 0

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
        self.ledger.check_quiet(row)
        columns, num_pages = self._held(row)
        last_start = self._last_start(row)
        length = int(self.ledger.resolved_len[row])
        if last_start >= length:
            self._unfit_ct += length > 0
            return None
        if not self._fits(num_pages):
            self._full_ct += 1
            return None
        number = self._num_handles + 1
        handle = Handle(
            number,
            self.ledger.tag(row),
            length,
            min(int(self.ledger.drafted_len[row]), length),
            last_start,
            columns,
            tuple(g.take(n, number) for g, n in zip(self._pages, num_pages, strict=True)),
        )
        self._handles[number], self._num_handles = handle, number
        try:
            try:
                self._copies.save(self._moves(handle, row, 0, length))
            except Exception:
                self._failed_ct += 1
                self._give_back(handle)
                return None
            self.ledger.retract(row)
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
        chunk_end = start + (self.ledger.max_chunk or handle.length)
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
                self._copies.load(self._moves(handle, row, start, end))
        except BaseException:
            self._failed_ct += 1
            for handle in handles:
                self._give_back(handle)
            raise
        for handle, end in zip(handles, lanes[2], strict=True):
            if end == handle.length:
                self._give_back(handle)
                self._reload_ct += 1

    def check_room(self, handle: Handle) -> None:
        """Whether every group has the pages for a reload now, if no one else takes any.

        Raises:
            OutOfPages: of the first group that has not.
        """
        most, start = [0] * len(self._pages), 0
        while start < handle.length:
            end, _ = self.next_extend(handle, start)
            for g, (size, window) in enumerate(zip(self._sizes, self._windows, strict=True)):
                below = 0 if window is None else max(0, start - window + 1) // size
                most[g] = max(most[g], -(-end // size) - below)
            start = end
        for g, (spec, need) in enumerate(zip(self.ledger.groups, most, strict=True)):
            free, fenced = self.ledger.free_pages(g), self.ledger.fenced_pages(g)
            if need > free:
                reclaimable = self.ledger.reclaimable_pages(g)
                raise OutOfPages(
                    f"group {spec.name}: reload of {handle.tag} needs {need} pages, {free} free, "
                    f"{fenced} fenced, {reclaimable} reclaimable",
                    spec.name,
                    need,
                    free,
                    fenced,
                    reclaimable,
                )

    def trim(self, handle: Handle, length: int) -> Handle | None:
        """Keep the KV of a handle's first `length` tokens alone.

        Returns:
            The handle to use from here on; None where it is dropped: no token is left, or less of a
            window than any reload would leave.

        Raises:
            OrderError: it is not held any more.
            ShapeError: it has fewer tokens.
        """
        self._check(handle)
        if not 0 <= length <= handle.length:
            raise ShapeError(f"length must be in [0, {handle.length}], got {length}")
        if length == handle.length:
            return handle
        if handle.last_start >= length:
            self.drop(handle)
            return None
        kept, spare = [], []
        for size, first, pages in zip(self._sizes, handle.columns, handle.pages, strict=True):
            num_pages = max(-(-length // size) - first, 0)
            kept.append(pages[:num_pages])
            spare.append(pages[num_pages:])
        shorter = replace(
            handle,
            length=length,
            drafted_len=min(handle.drafted_len, length),
            pages=tuple(kept),
        )
        self._handles[handle.number] = shorter
        for pool, pages in zip(self._pages, spare, strict=True):
            pool.give_back(pages)
        return shorter

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
        seconds = self._copies.seconds(self._held(row)[1])
        return seconds < int(self.ledger.resolved_len[row]) * token_seconds

    def holds(self, handle: Handle) -> bool:
        """Whether the handle is good: not dropped, trimmed or reloaded."""
        return self._handles.get(handle.number) is handle

    @property
    def handles(self) -> list[Handle]:
        """All that are held, the oldest first."""
        return list(self._handles.values())

    def stats(self) -> HostStats:
        """What it holds now and has done."""
        return HostStats(
            tuple(
                HostPoolStats(spec.name, size, pages.num_pages, pages.num_free)
                for spec, size, pages in zip(
                    self.ledger.groups, self._copies.page_bytes, self._pages, strict=True
                )
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
        for g, (spec, pages) in enumerate(zip(self.ledger.groups, self._pages, strict=True)):
            held = self._held_pages(g)
            found += [f"group {spec.name}: {finding}" for finding in pages.findings(held)]
        if found:
            raise CorruptState("\n".join(found))

    def recover(self, kept: Sequence[Handle]) -> list[Handle]:
        """Keep these alone, as Ctrl-C came between any two calls; returns those that are good."""
        self._handles = {h.number: h for h in kept if self._handles.get(h.number) is h}
        for g, pages in enumerate(self._pages):
            pages.reset(self._held_pages(g))
        return self.handles

    def close(self) -> None:
        """Drop what is held. Twice is once."""
        for handle in self.handles:
            self.drop(handle)

    # --- how it is done -------------------------------------------------------------------------

    def _held_pages(self, group: int) -> dict[int, Pages]:
        """The group's pages of each handle, by its number."""
        return {number: handle.pages[group] for number, handle in self._handles.items()}

    def _held(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of each group: the first column that the row holds, and how many have tokens."""
        length, sizes = int(self.ledger.resolved_len[row]), self._sizes
        firsts = [int(self.ledger.evicted_len(g)[row]) // size for g, size in enumerate(sizes)]
        ends = [-(-length // size) for size in sizes]
        return tuple(firsts), tuple(b - a for a, b in zip(firsts, ends, strict=True))

    def _last_start(self, row: int) -> int:
        """Return the earliest start for the last extend of a reload.

        An extend from there evicts at least every page that the row had evicted already.
        """
        starts = [0]
        for g, window in enumerate(self._windows):
            evicted = int(self.ledger.evicted_len(g)[row])
            if window is not None and evicted:
                starts.append(evicted + window - 1)
        return max(starts)

    def _fits(self, num_pages: Sequence[int]) -> bool:
        """Whether every group has so many host pages, before any is taken."""
        return all(n <= g.num_free for n, g in zip(num_pages, self._pages, strict=True))

    def _moves(self, handle: Handle, row: int, start: int, end: int) -> Moves:
        """What the row holds of the slots `[start, end)`, in whole pages, and where it is here."""
        moves = []
        for g, (size, first) in enumerate(zip(self._sizes, handle.columns, strict=True)):
            to = -(-end // size)
            begin = min(max(start // size, first), to)
            pages = handle.pages[g][begin - first : to - first]
            moves.append((self.ledger.page_table(g)[row, begin:to], pages))
        return moves

    def _check(self, handle: Handle) -> None:
        if not self.holds(handle):
            raise OrderError(
                f"handle {handle.number} of {handle.tag} is not held: dropped, trimmed or reloaded"
            )

    def _give_back(self, handle: Handle) -> None:
        if self._handles.pop(handle.number, None) is not None:
            for pool, pages in zip(self._pages, handle.pages, strict=True):
                pool.give_back(pages)
