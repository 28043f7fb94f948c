"""The busy check: before each turn, check that pages, rows and requests are consistent.

Level 0 does nothing; only the checks inside the ledger's calls remain. Level 1 compares sums and
rows, O(rows). Level 2 adds the ledger's full audit, and compares the device's page tables with the
ledger's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpool._core import Ledger
from specpool.engine.config import OnFinding
from specpool.engine.memory.kv_cache import KVCache
from specpool.engine.scheduler.scheduler import Scheduler
from specpool.errors import CorruptState

#: The most findings that are kept.
MAX_FINDINGS = 100

_OWNED = 1

_log = logging.getLogger("specpool")


@dataclass(frozen=True, slots=True)
class BusyFinding:
    """One inconsistency that the busy check found.

    Attributes:
        text: the broken rule, with the numbers.
        group: the name of the group, if the finding is about one.
        page: the page that the finding is about; if it names none, the row's last page in the
            group.
        row: the row that breaks the rule, if it is one.
        rows: the rows to take out of use: `row`, or all rows that hold `page`.
        state: the page's state: free, owned, shared, fenced.
        owner: the row that took the page, such as `row 3 (request 17)`.
        birth_step: the step that the page was taken for.
        last_verb: the latest ledger verb that touched the page.
        well_at: the newest step at the last check without a finding.
    """

    text: str
    group: str | None
    page: int | None
    row: int | None
    rows: tuple[int, ...]
    state: str | None
    owner: str | None
    birth_step: int | None
    last_verb: str | None
    well_at: int

    def __str__(self) -> str:
        """Return the report in one line."""
        page = ""
        if self.state is not None:
            page = (
                f"; page {self.page} of group {self.group}: {self.state}, taken by {self.owner} "
                f"for step {self.birth_step}, last verb {self.last_verb}"
            )
        return f"{self.text}{page}; all was well at step {self.well_at}"


@dataclass(frozen=True, slots=True)
class _Fault:
    text: str
    group: int | None = None
    page: int | None = None
    row: int | None = None


class BusyCheck:
    """The check of an engine's parts. Rows with a finding are out of use until the engine closes.

    Attributes:
        findings: the latest `MAX_FINDINGS` findings, oldest first; each appears once.
        finding_ct: findings since the engine was built.
    """

    def __init__(
        self,
        ledger: Ledger,
        scheduler: Scheduler,
        cache: KVCache,
        *,
        level: int,
        on_finding: OnFinding,
    ) -> None:
        """Check these parts; `EngineConfig` explains `level` and `on_finding`."""
        self._ledger, self._scheduler, self._cache = ledger, scheduler, cache
        self._level, self._on_finding = level, on_finding
        self._groups = ledger.groups
        self._taken_out: set[int] = set()
        # The newest launched step: now, and at the last look without a finding.
        self._step = self._well_at = 0
        # What the device's tables must hold; None if not known. Calibration leaves it unknown: the
        # table delta of the rows that it gave back goes to the device with the next step.
        self._tables: list[npt.NDArray[np.int32]] | None = None
        self.findings: deque[BusyFinding] = deque(maxlen=MAX_FINDINGS)
        self.finding_ct = 0

    @property
    def rows(self) -> list[int]:
        """The rows that are out of use."""
        return [row for row in self._taken_out if self._scheduler.rows.is_quarantined(row)]

    @property
    def num_pages(self) -> list[int]:
        """The number of pages that rows out of use own, for each group."""
        rows, counts = self.rows, [0] * len(self._groups)
        for g in range(len(counts)) if rows else ():
            states, owners, _ = self._ledger.ownership_map(g)
            counts[g] = int(((states == _OWNED) & np.isin(owners, rows)).sum())
        return counts

    def forget_tables(self) -> None:
        """Skip the device's tables until `note_tables`, because they are about to change."""
        self._tables = None

    def note_tables(self, step: int) -> None:
        """Remember what the device's tables must hold now that step `step` has updated them."""
        self._step = step
        self._tables = self._host_tables()

    def look(self) -> CorruptState | None:
        """Check everything that the level asks for, and take rows with new findings out of use.

        Returns:
            The error that the caller must raise; None if there is nothing new, or if taking the
            rows out of use is enough.
        """
        if self._level == 0:
            return None
        new_findings = [
            self._report(fault) for fault in self._faults() if not self._is_known(fault)
        ]
        if not new_findings:
            self._well_at = self._step
            return None
        for finding in new_findings:
            if finding.text not in [old.text for old in self.findings]:
                self.findings.append(finding)
                self.finding_ct += 1
                _log.error("busy check: %s", finding)
            for row in finding.rows:
                if row not in self.rows:
                    self._taken_out.add(row)
                    self._scheduler.quarantine(row, f"busy check: {finding}")
        if self._on_finding == "quarantine" and all(finding.rows for finding in new_findings):
            return None
        return CorruptState(f"busy check: {'; '.join(map(str, new_findings))}")

    # --- what may be wrong ----------------------------------------------------------------------

    def _faults(self) -> list[_Fault]:
        faults, sums = [*self._wrong_rows()], [*self._wrong_sums()]
        if sums or self._level == 2:
            audit = [_Fault(f.text, f.group, f.page, f.row) for f in self._ledger.audit()]
            # The audit names the page or row. If it finds nothing, report the wrong sum itself.
            faults += audit or sums
        if self._level == 2:
            faults += self._wrong_tables()
        return faults

    def _wrong_sums(self) -> Iterator[_Fault]:
        """Yield each group in which free + fenced + held pages are not all pages.

        A shared page counts once. Also check that the ledger holds exactly the pinned prefixes.
        """
        ledger, out_of_use, lost = self._ledger, self.rows, self.num_pages
        pins = {pin.prefix for pin in self._scheduler.pins}
        leaving = self._scheduler.exports.prefixes
        if pins | leaving != set(ledger.prefixes):
            exported = f", {sorted(leaving)} exported" if leaving else ""
            yield _Fault(
                f"the prefixes {ledger.prefixes} are held, {sorted(pins)} are pinned{exported}"
            )
        for g, group in enumerate(self._groups):
            protected = ledger.protected_len(g)
            lens = ledger.allocated_len(g).astype(np.int64)
            # A page of the prefix cache may be partly filled; it is shared as a whole.
            shared_end = -(-protected // group.page_size) * group.page_size
            evicted = ledger.evicted_len(g)
            sinks = np.minimum(-(-group.sink // group.page_size) * group.page_size, evicted)
            lens -= np.maximum(shared_end, evicted) - np.maximum(sinks - shared_end, 0)
            lens[out_of_use] = 0
            num_held = int(lens.sum()) // group.page_size + ledger.shared_pages(g)
            num_held += lost[g] + self._num_kept(g)
            slots = ledger.allocated_len(g).astype(np.int64) - evicted + sinks
            num_cells = int(slots.sum()) // group.page_size
            if not out_of_use and num_cells != ledger.held_cells(g):
                text = f"group {group.name}: the rows' lengths are those of {num_cells} pages"
                yield _Fault(f"{text}, the table has {ledger.held_cells(g)}", g)
            free, fenced = ledger.free_pages(g), ledger.fenced_pages(g)
            cached = ledger.cached_pages(g)
            if free + cached + fenced + num_held != group.num_pages:
                yield _Fault(
                    f"group {group.name}: {num_held} pages held + {free} free + {cached} cached + "
                    f"{fenced} fenced are not {group.num_pages}",
                    g,
                )

    def _num_kept(self, g: int) -> int:
        """Count the unshared pages of a window group that checkpoints keep outside the table."""
        ledger, size, window = self._ledger, self._groups[g].page_size, self._groups[g].window
        if window is None:
            return 0
        num_kept, evicted, protected = 0, ledger.evicted_len(g), ledger.protected_len(g)
        sinks = -(-self._groups[g].sink // size)
        for row in np.flatnonzero(evicted).tolist():
            length = ledger.checkpoint_len(row)
            if length is not None and row not in self.rows:
                first = max(max(0, length - window + 1) // size, -(-int(protected[row]) // size))
                first = max(first, sinks)
                num_kept += max(0, min(-(-length // size), int(evicted[row]) // size) - first)
        return num_kept

    def _wrong_rows(self) -> Iterator[_Fault]:
        """Yield rows of requests and sessions that are not live at their epoch, or not unique.

        Also yield live rows that no request and no session has.
        """
        ledger, epoch = self._ledger, self._ledger.epoch
        owners = {
            row: (f"session {conversation.number}", conversation.epoch)
            for row, conversation in self._scheduler.conversations.rows()
        }
        for request in self._scheduler.running:
            if not request.row:
                continue
            name = f"request {request.request_id}"
            if request.row in owners:
                text = f"{name} and {owners[request.row][0]} both have {self._name(request.row)}"
                yield _Fault(text, row=request.row)
            owners[request.row] = name, request.epoch
        for row, (owner, taken_at) in owners.items():
            if not ledger.is_live(row):
                yield _Fault(f"{owner} has {self._name(row)}, which is not live", row=row)
            elif int(epoch[row]) != taken_at:
                text = f"{self._name(row)} is at epoch {epoch[row]}, {owner} took it at {taken_at}"
                yield _Fault(text, row=row)
        for row in range(1, ledger.num_rows + 1):
            if ledger.is_live(row) and row not in owners:
                yield _Fault(f"{self._name(row)} is live, but nobody has it", row=row)

    def _wrong_tables(self) -> Iterator[_Fault]:
        """Yield the rows whose page table on the device differs from the ledger's."""
        for g, expected in enumerate(self._tables or ()):
            table = self._cache.tables[g].cpu().numpy()
            rows, columns = np.nonzero(table != expected)
            for row, first in zip(*np.unique(rows, return_index=True), strict=True):
                column = columns[first]
                yield _Fault(
                    f"{self._name(int(row))} column {column} of group {self._groups[g].name} is "
                    f"page {table[row, column]} on the device, {expected[row, column]} in the "
                    "ledger",
                    g,
                    int(expected[row, column]) or None,
                    int(row),
                )

    def _host_tables(self) -> list[npt.NDArray[np.int32]] | None:
        if self._level < 2:
            return None
        return [self._ledger.full_table(g) for g in range(len(self._groups))]

    # --- the rows of a fault --------------------------------------------------------------------

    def _is_known(self, fault: _Fault) -> bool:
        """Return whether the fault is about a row that is out of use already."""
        rows = self.rows
        if not rows:
            return False
        if fault.row is not None:
            return fault.row in rows
        if fault.page is None or fault.group is None:
            return False
        return not self._holders(fault.group, fault.page).isdisjoint(rows)

    def _holders(self, group: int, page: int) -> set[int]:
        """Return the row that took the page, and all rows that hold it in their page table."""
        ledger, P = self._ledger, self._groups[group].page_size
        columns = np.arange(ledger.pages_per_row(group))
        is_held = columns < ledger.allocated_len(group)[:, None] // P
        is_held &= (columns * P < self._groups[group].sink) | (
            columns >= ledger.evicted_len(group)[:, None] // P
        )
        holds_page = (is_held & (ledger.page_table(group) == page)).any(axis=1)
        rows = set(np.flatnonzero(holds_page).tolist())
        return rows | {ledger.page_record(group, page)[1]} if page > 0 else rows

    def _report(self, fault: _Fault) -> BusyFinding:
        group, page, rows = fault.group, fault.page, set[int]()
        if fault.row is not None:
            rows.add(fault.row)
            if page is None:
                group = group or 0
                page = self._last_page(group, fault.row)
        elif page is not None and group is not None:
            rows = self._holders(group, page)
        state = owner = birth_step = verb = None
        if page and group is not None:  # page 0 has no record
            state, owner_row, birth_step, verb = self._ledger.page_record(group, page)
            owner = self._name(owner_row)
        return BusyFinding(
            text=fault.text,
            group=None if group is None else self._groups[group].name,
            page=page,
            row=fault.row,
            rows=tuple(sorted(row for row in rows if self._is_in_use(row))),
            state=state,
            owner=owner,
            birth_step=birth_step,
            last_verb=verb,
            well_at=self._well_at,
        )

    def _last_page(self, group: int, row: int) -> int | None:
        cells = self._ledger.page_table(group)[row]
        pages = cells[(cells > 0) & (cells <= self._groups[group].num_pages)]
        return int(pages[-1]) if len(pages) else None

    def _is_in_use(self, row: int) -> bool:
        has_request = row > 0 and any(r.row == row for r in self._scheduler.running)
        return has_request or self._ledger.is_live(row)

    def _name(self, row: int) -> str:
        tag = self._ledger.tag(row)
        return f"row {row}" if tag is None else f"row {row} ({tag})"
