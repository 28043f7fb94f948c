"""`HostTier`: keeps KV of retracted requests, idle sessions and texts on the host (docs/host.md).

A request's KV is either in a row of the ledger or held by a `Handle`; it is in both only while the
steps of a reload run. A handle holds target and draft KV, with pages in every group, and the slot
of a recurrent state: such a handle comes back at once, to a row that `Ledger.import_row` gives.
Texts are kept in blocks (`texts.py`), from which a handle is lent. `Copies` copies the pages.
`copies.py` copies real memory; the simulator has a stand-in whose copies fail at random.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specpool._core import Ledger, Plan
from specpool.arrays import Int32
from specpool.engine.config import Offload
from specpool.engine.memory.host.handle import Copies, Handle, Moves
from specpool.engine.memory.host.pages import HostPages, Pages
from specpool.engine.memory.host.texts import HostTexts
from specpool.errors import CorruptState, OrderError, OutOfPages, ShapeError


@dataclass(frozen=True, slots=True)
class HostPoolStats:
    """Host pages of one group."""

    name: str
    page_bytes: int
    num_pages: int
    free_pages: int


@dataclass(frozen=True, slots=True)
class HostStats:
    """The current contents of a host tier, and its counters.

    Attributes:
        groups: the host pages of each group.
        num_handles: requests and sessions on the host.
        offload_ct: rows that were offloaded.
        reload_ct: handles that became rows again.
        drop_ct: handles that were dropped.
        full_ct: rows that were not offloaded because host pages ran out.
        unfit_ct: rows that were not offloaded because a trim has left less of a window than a
            reload needs.
        failed_ct: copies that failed, in either direction.
        text_tokens: tokens of texts whose KV is kept for later requests.
        lent_ct: texts that began to come back for a request.
        text_eviction_ct: blocks of texts that gave way to others.
    """

    groups: tuple[HostPoolStats, ...]
    num_handles: int
    offload_ct: int
    reload_ct: int
    drop_ct: int
    full_ct: int
    unfit_ct: int
    failed_ct: int
    text_tokens: int
    lent_ct: int
    text_eviction_ct: int


class HostTier:
    """The store of rows' KV on the host, with the way there and back.

    Attributes:
        ledger: the ledger of the rows.
        texts: the texts that are kept for later requests. They give way to rows.
    """

    def __init__(self, ledger: Ledger, copies: Copies, *, policy: Offload = "cost") -> None:
        """Start empty; `policy` decides the answer of `pays` (`EngineConfig.offload`)."""
        self.ledger = ledger
        self._copies, self._policy = copies, policy
        self._pages = [HostPages(n) for n in copies.num_pages]
        self._numbers = itertools.count(1)  # of handles and blocks
        self.texts = HostTexts(ledger, copies, self._pages, self._numbers, self._is_worth_copying)
        self._sizes = [group.page_size for group in ledger.groups]
        self._windows = [group.window for group in ledger.groups]
        self._sinks = [-(-group.sink // group.page_size) for group in ledger.groups]
        self._names = [*(group.name for group in ledger.groups), *(s.name for s in ledger.states)]
        self._handles: dict[int, Handle] = {}
        self._offload_ct = self._reload_ct = self._drop_ct = 0
        self._full_ct = self._unfit_ct = self._failed_ct = self._lent_ct = 0

    def save(self, row: int) -> Handle | None:
        """Copy the KV of a quiet row to host pages; the caller then retracts the row.

        Returns:
            The handle. Or None, with nothing changed, if a group has too few free host pages, the
            copy fails, the row or its state has no tokens, or a trim, or the way from its state to
            its end, has left less of a window than a reload needs. The request of the row is then
            prefilled again.

        Raises:
            NotReady: a step of the row is in flight (`Ledger.check_quiet`).
            ShapeError: the row is not admitted.
        """
        self.ledger.check_quiet(row)
        length, last_start = self._kept_len(row), self._last_start(row)
        columns, num_pages = self._held_columns(row)
        if last_start >= length:
            self._unfit_ct += length > 0
            return None
        if not self.texts.make_room(num_pages):
            self._full_ct += 1
            return None
        number = next(self._numbers)
        handle = Handle(
            number,
            self.ledger.tag(row),
            length,
            min(int(self.ledger.drafted_len[row]), length),
            last_start,
            columns,
            tuple(g.take(n, number) for g, n in zip(self._pages, num_pages, strict=True)),
        )
        self._handles[number] = handle
        try:
            self._copies.save(self._moves(handle, row, 0, length))
        except BaseException as error:
            self._give_back(handle)
            if not isinstance(error, Exception):
                raise
            self._failed_ct += 1
            return None
        self._offload_ct += 1
        return handle

    def lend(
        self, tokens: Int32, salt: bytes, start: int, token_seconds: float, *, needs_draft: bool
    ) -> Handle | None:
        """Return a handle for a row that has `start` tokens of a text of which the host has more.

        The handle brings back all that is here but the last token of `tokens`, whose forward has to
        run; with recurrent states, a whole row, up to the longest state. Drop it if it is not
        reloaded. The text stays here.

        Args:
            tokens: the row's tokens to be, [n].
            salt: the salt of the text.
            start: tokens with KV in the row.
            token_seconds: seconds of prefill per token.
            needs_draft: whether only blocks with draft KV are of use.

        Returns:
            None if nothing more is here, or if the copies do not pay.
        """
        handle = self.texts.lend(tokens, salt, start, token_seconds, needs_draft=needs_draft)
        if handle is not None:
            self._handles[handle.number] = handle
            self._lent_ct += 1
        return handle

    def fill(self, handle: Handle, row: int) -> bool:
        """Copy a handle's KV and its recurrent state to a row, and free its own host pages.

        Launched steps may be in flight: their forwards are before the copies, on one stream.

        Args:
            handle: of a row with a state.
            row: what `Ledger.import_row` gave for the handle's lengths.

        Returns:
            Whether the copy was made. If not, the handle is dropped; abort the row, and prefill the
            request.

        Raises:
            OrderError: the handle is not held any more.
        """
        self._check(handle)
        try:
            self._copies.load(self._moves(handle, row, 0, handle.length))
        except BaseException as error:
            self._failed_ct += 1
            self.texts.discard(handle.blocks)  # else the next request would try it again
            self._give_back(handle)
            if not isinstance(error, Exception):
                raise
            return False
        self._give_back(handle)
        self._reload_ct += 1
        return True

    def next_extend(self, handle: Handle, start: int) -> tuple[int, bool]:
        """Return the next extend of a reload whose row has come to `start` tokens.

        Returns:
            The `new_len` and `writes_draft` arguments of `prepare_extend`.

        Raises:
            OrderError: the handle is not held any more.
            ShapeError: `start` is not in [0, handle.length).
        """
        self._check(handle)
        if not 0 <= start < handle.length:
            raise ShapeError(f"start must be in [0, {handle.length}), got {start}")
        chunk_end = start + (self.ledger.max_chunk or handle.length)
        ends = (handle.length, handle.last_start, handle.drafted_len, chunk_end)
        return min(end for end in ends if end > start), start < handle.drafted_len

    def restore(self, plan: Plan, handles: Sequence[Handle]) -> None:
        """Copy host pages to the pages of a launched reload step; it takes the forward's place.

        Call it after the step's table delta and page copies. When a row has reached its handle's
        length, the handle's host pages become free.

        Args:
            plan: an extend with the `new_len` that `next_extend` gave for each lane.
            handles: one per lane.

        Raises:
            OrderError: a handle is not held any more.
            Exception: a copy failed, and the handles are dropped. The caller must `abandon` the
                step and prefill the requests.
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
                self.texts.discard(handle.blocks)  # else the next request would try it again
                self._give_back(handle)
            raise
        for handle, end in zip(handles, lanes[2], strict=True):
            if end == handle.length:
                self._give_back(handle)
                self._reload_ct += 1

    def check_room(self, handle: Handle) -> None:
        """Check that every group has enough free pages for a reload now.

        Raises:
            OutOfPages: a group lacks pages; the error describes the first such group.
        """
        max_pages, start = [0] * len(self._pages), 0
        while start < handle.length:
            end, _ = self.next_extend(handle, start)
            for g, (size, window) in enumerate(zip(self._sizes, self._windows, strict=True)):
                below = 0 if window is None else max(0, start - window + 1) // size
                max_pages[g] = max(max_pages[g], -(-end // size) - max(below - self._sinks[g], 0))
            start = end
        for g, (spec, need) in enumerate(zip(self.ledger.groups, max_pages, strict=True)):
            free, fenced = self.ledger.free_pages(g), self.ledger.fenced_pages(g)
            cached = self.ledger.cached_pages(g)
            if need > free + cached:
                reclaimable = self.ledger.reclaimable_pages(g)
                raise OutOfPages(
                    f"group {spec.name}: reload of {handle.tag} needs {need} pages, {free} free, "
                    f"{cached} cached, {fenced} fenced, {reclaimable} reclaimable",
                    spec.name,
                    need,
                    free,
                    cached,
                    fenced,
                    reclaimable,
                )

    def trim(self, handle: Handle, length: int) -> Handle | None:
        """Cut a handle to its first `length` tokens.

        Returns:
            The handle to use from now on. None if it was dropped, because no token is left, or less
            of a window than a reload needs, or because its recurrent state has more tokens.

        Raises:
            OrderError: the handle is not held any more.
            ShapeError: `length` is not in [0, handle.length].
        """
        self._check(handle)
        if not 0 <= length <= handle.length or handle.is_lent:
            lent = " and no lent handle" if handle.is_lent else ""
            raise ShapeError(f"length must be in [0, {handle.length}]{lent}, got {length}")
        if length == handle.length:
            return handle
        if handle.last_start >= length or self.ledger.states:
            self.drop(handle)
            return None
        pages_kept, spare = [], []
        firsts = zip(self._sizes, handle.columns, self._sinks, strict=True)
        for (size, first, sinks), pages in zip(firsts, handle.pages, strict=True):
            num_pages = min(sinks, first) + max(-(-length // size) - first, 0)
            pages_kept.append(pages[:num_pages])
            spare.append(pages[num_pages:])
        shorter = replace(
            handle,
            length=length,
            drafted_len=min(handle.drafted_len, length),
            pages=tuple(pages_kept),
        )
        self._handles[handle.number] = shorter
        for pool, pages in zip(self._pages, spare, strict=True):
            pool.give_back(pages)
        return shorter

    def drop(self, handle: Handle) -> None:
        """Free a handle's host pages.

        Raises:
            OrderError: the handle is not held any more.
        """
        self._check(handle)
        self._give_back(handle)
        self._drop_ct += 1

    def pays(self, row: int, token_seconds: float) -> bool:
        """Return whether to save a row: as the policy says, or if copies beat a prefill.

        Args:
            row: the row that will be retracted.
            token_seconds: seconds of prefill per token.
        """
        num_pages = self._held_columns(row)[1]
        return self._is_worth_copying(num_pages, self._kept_len(row), token_seconds)

    def holds(self, handle: Handle) -> bool:
        """Return whether the handle is valid: not dropped, trimmed or reloaded."""
        return self._handles.get(handle.number) is handle

    @property
    def handles(self) -> list[Handle]:
        """All valid handles, oldest first."""
        return list(self._handles.values())

    def stats(self) -> HostStats:
        """Return what the tier holds now, and its counters."""
        return HostStats(
            tuple(
                HostPoolStats(name, size, pages.num_pages, pages.num_free)
                for name, size, pages in zip(
                    self._names, self._copies.page_bytes, self._pages, strict=True
                )
            ),
            len(self._handles),
            self._offload_ct,
            self._reload_ct,
            self._drop_ct,
            self._full_ct,
            self._unfit_ct,
            self._failed_ct + self.texts.failed_ct,
            len(self.texts) * self.texts.block_len,
            self._lent_ct,
            self.texts.eviction_ct,
        )

    def check(self) -> None:
        """Check that every host page is free, or held by exactly one handle or block of a text.

        Raises:
            CorruptState: the message has one line for each broken invariant.
        """
        findings = []
        for g, (name, pages) in enumerate(zip(self._names, self._pages, strict=True)):
            pages_held = self._held_pages(g)
            findings += [f"group {name}: {finding}" for finding in pages.findings(pages_held)]
        if findings:
            raise CorruptState("\n".join(findings))

    def recover(self, handles: Sequence[Handle]) -> list[Handle]:
        """Keep only these handles, after Ctrl-C at any point; return those that are valid."""
        self._handles = {h.number: h for h in handles if self._handles.get(h.number) is h}
        self.texts.recover([handle.blocks for handle in self.handles])
        for g, pages in enumerate(self._pages):
            pages.reset(self._held_pages(g))
        return self.handles

    def close(self) -> None:
        """Drop all handles and texts. A second call does nothing."""
        for handle in self.handles:
            self.drop(handle)
        self.texts.forget()

    # --- helpers --------------------------------------------------------------------------------

    def _held_pages(self, group: int) -> dict[int, Pages]:
        """Return number of a handle or a block -> its pages of a group."""
        handles = [handle for handle in self._handles.values() if not handle.is_lent]
        handle_pages = {handle.number: handle.pages[group] for handle in handles}
        return handle_pages | self.texts.held(group)

    def _kept_len(self, row: int) -> int:
        """Return the tokens of the row that a handle keeps: all, or those in its state."""
        lengths = self.ledger.state_len(0) if self.ledger.states else self.ledger.resolved_len
        return int(lengths[row])

    def _held_columns(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return, for each group, the first column to keep behind a gap, and the number of pages.

        The columns of a sink lie before the gap. With states a row has, when it comes
        back, the columns of its windows alone. A state group has one page, and no columns.
        """
        length, sizes = self._kept_len(row), self._sizes
        if self.ledger.states:
            firsts = [
                0 if window is None else max(length - window + 1, 0) // size
                for size, window in zip(sizes, self._windows, strict=True)
            ]
        else:
            firsts = [int(self.ledger.evicted_len(g)[row]) // size for g, size in enumerate(sizes)]
        ends = [-(-length // size) for size in sizes]
        columns = zip(firsts, ends, self._sinks, strict=True)
        num_pages = [b - a + min(sinks, a) for a, b, sinks in columns]
        return tuple(firsts), (*num_pages, *(1 for _ in self.ledger.states))

    def _last_start(self, row: int) -> int:
        """Return the earliest start for the last extend of a reload.

        An extend from there evicts at least every page that the row had evicted already. So the
        windows below any later length are held.
        """
        starts = [0]
        for g, window in enumerate(self._windows):
            evicted = int(self.ledger.evicted_len(g)[row])
            if window is not None and evicted:
                starts.append(evicted + window - 1)
        return max(starts)

    def _is_worth_copying(
        self, num_pages: Sequence[int], num_tokens: int, token_seconds: float
    ) -> bool:
        """Return whether to copy these pages, as the policy says, or if a prefill takes longer."""
        if self._policy != "cost":
            return self._policy == "always"
        return self._copies.seconds(num_pages) < num_tokens * token_seconds

    def _moves(self, handle: Handle, row: int, start: int, end: int) -> Moves:
        """Return, per group, the row's pages of slots `[start, end)` and their host pages.

        The state slot comes last, if there are states.
        """
        moves = []
        for g, (size, first) in enumerate(zip(self._sizes, handle.columns, strict=True)):
            end_column = -(-end // size)
            sinks = min(self._sinks[g], first)  # they come first
            columns = np.arange(start // size, end_column)
            columns = columns[(columns < sinks) | (columns >= first)]
            pages = handle.pages[g][np.where(columns < sinks, columns, columns - first + sinks)]
            moves.append((self.ledger.page_table(g)[row, columns], pages))
        if self.ledger.states:
            moves.append((self.ledger.state_slot(0)[[row]], handle.pages[-1]))
        return moves

    def _check(self, handle: Handle) -> None:
        if not self.holds(handle):
            raise OrderError(
                f"handle {handle.number} of {handle.tag} is not held: dropped, trimmed or reloaded"
            )

    def _give_back(self, handle: Handle) -> None:
        if self._handles.pop(handle.number, None) is None:
            return
        if handle.is_lent:
            self.texts.release(handle.blocks)
        else:
            for pool, pages in zip(self._pages, handle.pages, strict=True):
                pool.give_back(pages)
