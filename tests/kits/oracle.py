"""A slow, obvious model of the whole ledger, written from docs/contract.md alone.

Every verb checks all it can refuse before its first change, in the order that the verbs document.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence

from oracle_lend import Lending
from oracle_move import Moving
from oracle_state import (
    INDEX,
    Copy,
    Lane,
    Page,
    Part,
    Prefix,
    Refused,
    Round,
    Row,
    Step,
    others,
)
from reference import ceil_align


class Oracle(Lending, Moving):
    """The ledger as the contract says it."""

    # --- Rows come ---

    def admit(self, prefix: int | None = None, length: int | None = None) -> Row:
        if prefix is None:
            if length not in (None, 0):
                raise Refused("ShapeError")
            self._check_free_row()
            return Row(0, [Part() for _ in self.groups])
        if prefix not in self.prefixes:
            raise Refused("ShapeError")
        shared = self.prefixes[prefix]
        length = shared.length if length is None else length
        if not 0 <= length <= shared.length:
            raise Refused("ShapeError")
        if not all(self._needed(at, length) <= shared.tables[at].keys() for at in self._all):
            raise Refused("NotReady")
        self._check_free_row()
        return self._share(shared.tables, shared.evicted, length, shared.drafted)

    def fork(self, row: int) -> Row:
        source = self._row(row)
        if source.rounds or source.extend_from is not None:
            raise Refused("NotReady")
        if source.last_launched > self.completed or self._is_being_copied(source):
            raise Refused("NotReady")
        length = self._fork_len(source)
        tables = [part.table for part in source.parts]
        if not all(self._needed(at, length) <= tables[at].keys() for at in self._all):
            raise Refused("NotReady")
        self._check_free_row()
        evicted = [part.evicted for part in source.parts]
        new = self._share(tables, evicted, length, source.drafted)
        for at, part in enumerate(source.parts):
            part.protected = max(part.protected, self._floor(at, length))
        return new

    def _fork_len(self, row: Row) -> int:
        """Tokens that a fork of the row has."""
        return row.resolved

    def seat(self, row: Row, number: int) -> None:
        """The real ledger gave the new row this number."""
        assert number not in self.rows and number not in self.fenced_rows, f"row {number} is taken"
        assert 1 <= number <= self.num_rows, f"row {number} does not exist"
        row.number = number
        self.rows[number] = row

    def _share(
        self, tables: list[dict[int, Page]], evicted: list[int], length: int, drafted: int
    ) -> Row:
        tails = [int(length % group.page_size != 0) for group in self.groups]
        self._check_pages(tails, [], self._taken(tables, length))
        row = Row(0, [], resolved=length, drafted=min(drafted, length))
        for at, table in enumerate(tables):
            size = self.groups[at].page_size
            whole = length // size
            part = Part({column: page for column, page in table.items() if column < whole})
            for page in part.table.values():
                page.shared = True
            part.allocated, part.protected = ceil_align(length, size), whole * size
            part.evicted = min(evicted[at], self._evict_to(at, length))
            if tails[at]:
                part.table[whole] = self._take(at)
                copy = Copy(at, table[whole], part.table[whole], length % size, row, whole * size)
                self.pending.append(copy)
            row.parts.append(part)
        return row

    # --- Steps ---

    def prepare_extend(
        self, rows: Sequence[int], new_lens: Sequence[int], writes_draft: bool = True
    ) -> Step:
        taking = self._batch(rows, new_lens)
        for row, new_len in zip(taking, new_lens, strict=True):
            if new_len <= row.resolved:
                raise Refused("ShapeError")
        for row, new_len in zip(taking, new_lens, strict=True):
            if new_len - row.resolved > self.max_chunk:
                raise Refused("ShapeError")
        self._check_no_stale_step()
        if any(row.rounds or row.extend_from is not None for row in taking):
            raise Refused("NotReady")
        ended = [
            row.number
            for row, length in zip(taking, new_lens, strict=True)
            if length > self.context
        ]
        if ended:
            raise Refused("ContextEnd", rows=ended)
        wanted = [[length] * len(self.groups) for length in new_lens]
        step = self._claim("extend", taking, [0] * len(taking), wanted, writes_draft)
        for row, new_len in zip(taking, new_lens, strict=True):
            row.extend_from = row.resolved
            if writes_draft and row.drafted == row.resolved:
                row.drafted = new_len
            row.resolved = new_len
        return step

    def tokens_required(self, rows: Sequence[int], shapes: Sequence[int]) -> list[int]:
        total = [0] * len(self.groups)
        for number, shape in zip(rows, shapes, strict=True):
            row = self._row(number)
            for at, slots in enumerate(self._wanted(row, shape)):
                held = row.parts[at].allocated
                total[at] += max(0, ceil_align(slots, self.groups[at].page_size) - held)
        return total

    def prepare_decode(
        self, rows: Sequence[int], shapes: Sequence[int], writes_draft: bool = True
    ) -> Step:
        taking = self._batch(rows, shapes)
        if any(not 0 <= shape < len(self.shapes) for shape in shapes):
            raise Refused("ShapeError")
        self._check_no_stale_step()
        if any(not row.has_root for row in taking):
            raise Refused("NotReady")
        ended = [row.number for row in taking if row.resolved >= self.context]
        if ended:
            raise Refused("ContextEnd", rows=ended)
        if any(len(row.rounds) > self.depth for row in taking):
            raise Refused("OrderError")
        for row, shape in zip(taking, shapes, strict=True):
            S, _, N = self.shapes[shape]
            behind = row.drafted < row.resolved or not all(
                claimed.writes_draft for claimed in row.rounds
            )
            if self.draft_kv and behind and (S > 0 or N > 1):
                raise Refused("DraftLag", row=row.number)
        wanted = [self._wanted(row, shape) for row, shape in zip(taking, shapes, strict=True)]
        step = self._claim("decode", taking, list(shapes), wanted, writes_draft)
        for row, shape in zip(taking, shapes, strict=True):
            row.rounds.append(Round(step.number, self._most(shape), writes_draft))
        return step

    def launch(self, step: int) -> None:
        waiting = [record for record in self.steps if not record.launched]
        if not waiting or waiting[0].number != step:
            raise Refused("OrderError")
        if self._is_stale(waiting[0]):
            raise Refused("StalePlan", step=step)
        waiting[0].launched = True
        self.launched.add(step)
        for tail in waiting[0].copies:
            tail.row.last_launched = step
        for lane in waiting[0].lanes:
            lane.row.last_launched = step
            if waiting[0].kind == "extend":
                lane.row.extend_from, lane.row.has_root = None, True
            for claimed in lane.row.rounds:
                claimed.launched = claimed.launched or claimed.step == step
        self._sweep()

    def resolve(self, step: int, accept_lens: Sequence[int]) -> None:
        record = self._step(step)
        if record.kind == "extend" or not record.launched or record.resolved:
            raise Refused("OrderError")
        if len(accept_lens) != len(record.lanes):
            raise Refused("ShapeError")
        standing = [
            (lane.row, accept_len)
            for lane, accept_len in zip(record.lanes, accept_lens, strict=True)
            if self._stands(lane)
        ]
        for row, accept_len in standing:
            if row.rounds[0].step != step:
                raise Refused("OrderError")
            if not 1 <= accept_len <= row.rounds[0].most:
                raise Refused("ShapeError")
        for row, accept_len in standing:
            if row.rounds.pop(0).writes_draft and row.drafted == row.resolved:
                row.drafted += accept_len
            row.resolved += accept_len
        record.resolved = True
        self._sweep()

    def complete(self, step: int) -> None:
        if step not in self.launched:
            raise Refused("OrderError")
        self.completed = max(self.completed, step)
        for number, fence in list(self.fenced_rows.items()):
            if fence <= self.completed:
                del self.fenced_rows[number]
        self._sweep()

    def cancel(self, step: int) -> None:
        if not self.steps or self.steps[-1].number != step or self.steps[-1].launched:
            raise Refused("OrderError")
        gone = self.steps.pop()
        for lane in gone.lanes:
            if not self._stands(lane):
                continue
            row = lane.row
            for at in self._all:
                self._drop_from(row, at, lane.allocated[at], fence=0)
            row.idle = lane.idle
            if gone.kind == "extend":
                row.resolved, row.drafted, row.extend_from = lane.resolved, lane.drafted, None
            else:
                row.rounds.pop()
        self.pending = [tail for tail in gone.copies if tail.stands] + self.pending
        self._sweep()

    def abandon(self, step: int) -> None:
        record = self._step(step)
        if not record.launched or record.abandoned or step <= self.completed:
            raise Refused("OrderError")
        struck = [lane.row for lane in record.lanes] + [tail.row for tail in record.copies]
        for row in struck:
            if self.rows.get(row.number) is row:
                self.give_back(row.number)
        record.abandoned = record.resolved = True
        self._sweep()

    def take_delta(self, step: int) -> None:
        self._step(step)
        self.takes.add(step)

    def ack_delta(self, step: int) -> None:
        if step not in self.takes:
            raise Refused("OrderError")
        self.takes = {taken for taken in self.takes if taken > step}

    def snapshot(self) -> Oracle:
        if self.steps:
            raise Refused("NotReady")
        return copy.deepcopy(self)

    def restore(self, snapshot: Oracle) -> None:
        if self.steps:
            raise Refused("NotReady")
        now = vars(self).copy()
        vars(self).update(vars(copy.deepcopy(snapshot)))
        for name in ("next_step", "completed", "next_prefix"):
            setattr(self, name, max(now[name], getattr(snapshot, name)))
        self.launched |= now["launched"]
        self.takes = now["takes"]
        pairs = zip(now["epochs"], snapshot.epochs, strict=True)
        self.epochs = [0, *[max(pair) + 1 for pair in pairs][1:]]

    # --- Rows get shorter, or go ---

    def trim(self, row: int, length: int, *, ends_turn: bool = False) -> int:
        state = self._row(row)
        if length < 0:
            raise Refused("ShapeError")
        cut = min(length, state.written)
        while not self._can_end_at(state, cut):
            cut -= 1
        roots = max(0, cut - state.resolved)
        counted = [claimed for claimed in state.rounds if claimed.launched][:roots]
        if state.drafted == state.resolved and all(claimed.writes_draft for claimed in counted):
            state.drafted = cut
        state.drafted = min(state.drafted, cut)
        fence = self._fence(state)
        for at, part in enumerate(state.parts):
            self._drop_from(state, at, ceil_align(cut, self.groups[at].page_size), fence)
            part.protected = min(part.protected, cut)
            window = self._evict_to(at, cut)
            if part.evicted > window:
                size = self.groups[at].page_size
                first = window // size
                while self._window(at, cut) and first - 1 in part.kept:
                    first -= 1  # What the checkpoint keeps below the window comes along.
                back = {column: page for column, page in part.kept.items() if column >= first}
                part.table |= back
                part.evicted = first * size
        if state.checkpoint is not None and cut < state.checkpoint:
            self._forget_checkpoint(state)
        state.has_root &= cut == state.resolved and not state.rounds and not ends_turn
        state.resolved, state.rounds, state.extend_from = cut, [], None
        self.epochs[row] += 1
        self._sweep()
        return cut

    def end_turn(self, row: int, length: int) -> int:
        if not self.sessions and any(group.window is not None for group in self.groups):
            raise Refused("ConfigError")
        cut = self.trim(row, length, ends_turn=True)
        state = self.rows[row]
        self._forget_checkpoint(state)
        state.idle, state.checkpoint = True, self._checkpoint(state)
        for at, part in enumerate(state.parts):
            if self.groups[at].window is not None:
                columns = self._window(at, state.checkpoint) - self._sinks(at)
                part.kept = {column: part.table[column] for column in columns}
        self._sweep()
        return cut

    def _checkpoint(self, row: Row) -> int:
        """Tokens of the checkpoint that `end_turn` makes."""
        return row.resolved

    def give_back(self, row: int) -> None:
        """`retract`, `finish` and `abort`."""
        state = self._row(row)
        fence = self._fence(state)
        for page in state.pages():
            page.fence = max(page.fence, fence)
        del self.rows[row]
        state.parts = [Part() for _ in self.groups]
        self.epochs[row] += 1
        if state.last_launched > self.completed:
            self.fenced_rows[row] = state.last_launched
        self._sweep()

    retract = finish = abort = give_back

    # --- Prefixes ---

    def pin_prefix(self, row: int, length: int) -> int:
        state = self._row(row)
        if not 1 <= length <= state.resolved:
            raise Refused("ShapeError")
        length = min(self._floor(at, length) for at in range(len(self.groups)))
        if length == 0:
            raise Refused("ShapeError")
        ends = [ceil_align(length, group.page_size) for group in self.groups]
        if self._first_written(state) < max(ends):
            raise Refused("NotReady")
        if not all(self._needed(at, length) <= state.parts[at].table.keys() for at in self._all):
            raise Refused("NotReady")
        if self._is_being_copied(state):
            raise Refused("NotReady")
        tables = []
        for at, part in enumerate(state.parts):
            columns = ends[at] // self.groups[at].page_size
            tables.append({at: page for at, page in part.table.items() if at < columns})
            for page in tables[-1].values():
                page.shared = True
            part.protected = max(part.protected, ends[at])
        evicted = [
            min(part.evicted, self._evict_to(at, length)) for at, part in enumerate(state.parts)
        ]
        prefix = self.next_prefix
        self.prefixes[prefix] = Prefix(length, min(state.drafted, length), tables, evicted)
        self.next_prefix += 1
        return prefix

    def release_prefix(self, prefix: int) -> None:
        if prefix not in self.prefixes:
            raise Refused("ShapeError")
        del self.prefixes[prefix]
        self._sweep()

    # --- Parts of the verbs ---

    def _row(self, number: int) -> Row:
        if number not in self.rows:
            raise Refused("ShapeError")
        return self.rows[number]

    def _step(self, number: int) -> Step:
        for step in self.steps:
            if step.number == number:
                return step
        raise Refused("OrderError")

    def _batch(self, rows: Sequence[int], beside: Sequence[int]) -> list[Row]:
        if not 1 <= len(rows) <= self.max_batch or len(rows) != len(beside):
            raise Refused("ShapeError")
        if len(set(rows)) != len(rows):
            raise Refused("ShapeError")
        return [self._row(row) for row in rows]

    def _check_no_stale_step(self) -> None:
        if any(not step.launched and self._is_stale(step) for step in self.steps):
            raise Refused("NotReady")

    def _check_free_row(self) -> None:
        if self.num_free_rows() == 0:
            raise Refused("OutOfRows", num_rows=self.num_rows, fenced=len(self.fenced_rows))

    def _is_being_copied(self, row: Row) -> bool:
        return any(tail.row is row and tail.stands for tail in self.copies())

    def _first_written(self, row: Row) -> int:
        """The position from which on steps that are not complete write the row."""
        first = 1 << 31
        for step in self.steps:
            for lane in step.lanes:
                runs = step.number > self.completed and (step.launched or self._stands(lane))
                if runs and lane.row is row:
                    # The oldest round starts at r, a younger one at its lo if an older one fails.
                    oldest = row.rounds[0].step if row.rounds else 0
                    is_oldest = self._stands(lane) and step.number == oldest
                    first = min(first, max(lane.lo, row.resolved) if is_oldest else lane.lo)
        return first

    def _take(self, group: int) -> Page:
        self.pages.append(Page(group))
        return self.pages[-1]

    def _check_pages(self, need: Iterable[int], rows: list[Row], taken: Sequence[int] = ()) -> None:
        """Whether each group has the pages, with those that preparing `rows` evicts.

        `taken` of each group's cached pages cannot serve, because the call itself shares them.
        """
        holders, held_by_copy = self.holders(), self.held_by_copies()
        for at, pages in enumerate(need):
            droppers: dict[Page, list[Row]] = {}
            for row in rows:
                for column in self._below_window(row, at):
                    if column not in row.parts[at].kept:
                        droppers.setdefault(row.parts[at].table[column], []).append(row)
            freed = sum(
                len(others(holders[page])) == len(leaving)
                and page not in held_by_copy
                and max([page.fence, *map(self._fence, leaving)]) <= self.completed
                for page, leaving in droppers.items()
            )
            states = Counter(self.states(at, holders).values())
            free, cached = self.free_pages(at) + freed, states["cached"]
            if pages > free + cached - (taken[at] if taken else 0):
                raise Refused(
                    "OutOfPages",
                    group=self.groups[at].name,
                    need=pages,
                    free=free,
                    cached=cached,
                    fenced=states["fenced"],
                    reclaimable=self.reclaimable_pages(at, holders),
                )

    def _claim(
        self,
        kind: str,
        rows: list[Row],
        shapes: list[int],
        wanted: list[list[int]],
        writes_draft: bool,
    ) -> Step:
        evicts = any(self._below_window(row, at) for row in rows for at in self._all)
        after = [
            [
                max(part.allocated, ceil_align(slots, group.page_size))
                for part, slots, group in zip(row.parts, line, self.groups, strict=True)
            ]
            for row, line in zip(rows, wanted, strict=True)
        ]
        pages = [
            sum(line[at] - row.parts[at].allocated for row, line in zip(rows, after, strict=True))
            // group.page_size
            for at, group in enumerate(self.groups)
        ]
        self._check_pages(pages, rows)
        lanes = [
            Lane(
                row,
                self.epochs[row.number],
                shape,
                row.lo,
                row.hi,
                row.resolved,
                row.drafted,
                [part.allocated for part in row.parts],
                row.idle,
            )
            for row, shape in zip(rows, shapes, strict=True)
        ]
        for row, line in zip(rows, after, strict=True):
            for at, part in enumerate(row.parts):
                size = self.groups[at].page_size
                part.evicted = max(part.evicted, self._evict_to(at, row.reads_from))
                for column in self._below_window(row, at):
                    page = part.table.pop(column)
                    if column not in part.kept:
                        page.fence = max(page.fence, self._fence(row))
                for column in range(part.allocated // size, line[at] // size):
                    part.table[column] = self._take(at)
                part.allocated = line[at]
            row.idle = False
        step = Step(self.next_step, kind, lanes, writes_draft, self.pending)
        step.resolved, step.evicted = kind == "extend", evicts
        self.pending = []
        self.next_step += 1
        self.steps.append(step)
        self._sweep()
        return step

    def _taken(self, tables: list[dict[int, Page]], length: int) -> list[int]:
        """Cached pages of each group that a row of these tables begins with."""
        holders = self.holders()
        cached = {
            page
            for at in self._all
            for page, state in self.states(at, holders).items()
            if state == "cached"
        }
        ends = [-(-length // group.page_size) for group in self.groups]
        return [
            sum(page in cached for column, page in table.items() if column < end)
            for table, end in zip(tables, ends, strict=True)
        ]

    def _can_end_at(self, row: Row, length: int) -> bool:
        return all(
            self._needed(at, length) <= part.table.keys() | part.kept.keys()
            and (
                length >= part.protected
                or length % self.groups[at].page_size == 0
                or self._is_its_own(row, at, length // self.groups[at].page_size)
            )
            for at, part in enumerate(row.parts)
        )

    def _is_its_own(self, row: Row, at: int, column: int) -> bool:
        """Whether only the row and the prefix index hold the page."""
        part = row.parts[at]
        page = part.table.get(column) or part.kept.get(column)
        holders = self.holders().get(page, []) if page else []
        return INDEX in holders and others(holders) == [row]

    def _drop_from(self, row: Row, at: int, slots: int, fence: int) -> None:
        """The row gives up its pages from `slots` on, its checkpoint's too."""
        part, first = row.parts[at], slots // self.groups[at].page_size
        for table in (part.table, part.kept):
            for column in [column for column in table if column >= first]:
                page = table.pop(column)
                page.fence = max(page.fence, fence)
        part.allocated = min(part.allocated, slots)

    def _forget_checkpoint(self, row: Row) -> None:
        for part in row.parts:
            for column, page in part.kept.items():
                if column not in part.table:
                    page.fence = max(page.fence, self._fence(row))
            part.kept = {}
        row.checkpoint = None
