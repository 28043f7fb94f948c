"""The oracle's verbs for a prefix cache outside the ledger, from docs/contract.md alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from oracle_state import Page, Refused, Row, State


class Lending(State):
    """`lend`, `rebind`, `admit_lent`, `release_lent`; `Oracle` has the parts that they use."""

    _row: Any
    _share: Any
    _check_free_row: Any
    _first_written: Any
    _is_being_copied: Any

    def lend(self, row: int, start: int, end: int) -> None:
        state = self._row(row)
        self._check_range(state, start, end)
        self._check_final(state, end)
        pages = [page for _, _, page in self._range(state, start, end) if page]
        if any(page in self.lent for page in pages):
            raise Refused("PageStateError")
        for at, column, page in self._range(state, start, end):
            if page:
                page.shared = True
                self.lent[page] = (column + 1) * self.groups[at].page_size <= state.drafted
        self._protect(state, end)

    def rebind(self, row: int, start: int, end: int, pages: Sequence[int]) -> None:
        state = self._row(row)
        self._check_range(state, start, end)
        cells = list(self._range(state, start, end))
        if len(cells) != len(pages):
            raise Refused("ShapeError")
        bound = []
        for at in self._all:
            group_cells = [
                (column, page, name)
                for (group, column, page), name in zip(cells, pages, strict=True)
                if group == at
            ]
            if any(name and not page for _, page, name in group_cells):
                raise Refused("ShapeError")
            group_cells = [cell for cell in group_cells if cell[1]]
            lent_pages = self._named(at, [name for _, _, name in group_cells])
            tables = state.parts[at].table.items(), state.parts[at].kept.items()
            for (column, _, _), page in zip(group_cells, lent_pages, strict=True):
                size = self.groups[at].page_size
                elsewhere = any(
                    other is page and not start <= other_column * size < end
                    for table in tables
                    for other_column, other in table
                )
                if elsewhere or (column * size < state.drafted and not self.lent[page]):
                    raise Refused("ShapeError")
                bound.append((at, column, page))
        self._check_final(state, end)
        for at, column, page in bound:
            old_page = state.parts[at].table[column]
            old_page.fence = max(old_page.fence, self._fence(state))
            state.parts[at].table[column] = page
            if column in state.parts[at].kept:
                state.parts[at].kept[column] = page
        self._protect(state, end)
        self._sweep()

    def admit_lent(self, pages: Sequence[int], length: int) -> Row:
        if not 1 <= length <= self.context or not self._is_edge(length):
            raise Refused("ShapeError")
        counts = [length // group.page_size for group in self.groups]
        if sum(counts) != len(pages):
            raise Refused("ShapeError")
        tables, evicted, drafted = [], [], length
        for at, count in enumerate(counts):
            names = pages[sum(counts[:at]) : sum(counts[:at]) + count]
            size, sinks = self.groups[at].page_size, len(self._sinks(at))
            first = next((column for column in range(sinks, count) if names[column]), count)
            first = first if first > sinks else 0
            if first * size > self._evict_to(at, length):
                raise Refused("ShapeError")
            columns = [column for column in range(count) if column < sinks or column >= first]
            lent_pages = self._named(at, [names[column] for column in columns])
            for column, page in zip(columns, lent_pages, strict=True):
                if not self.lent[page]:
                    drafted = min(drafted, column * size)
            tables.append(dict(zip(columns, lent_pages, strict=True)))
            evicted.append(first * size)
        self._check_free_row()
        return self._share(tables, evicted, length, drafted)

    def release_lent(self, group: int, pages: Sequence[int]) -> None:
        if not 0 <= group < len(self.groups):
            raise Refused("ShapeError")
        for page in self._named(group, pages):
            del self.lent[page]
        self._sweep()

    def _is_edge(self, length: int) -> bool:
        return all(length % group.page_size == 0 for group in self.groups)

    def _check_range(self, row: Row, start: int, end: int) -> None:
        if not 0 <= start < end <= row.resolved or not self._is_edge(start):
            raise Refused("ShapeError")
        if not self._is_edge(end) or any(start > part.protected for part in row.parts):
            raise Refused("ShapeError")

    def _range(self, row: Row, start: int, end: int) -> Iterator[tuple[int, int, Page | None]]:
        """Each group, column and page of the range; no page where a window has passed."""
        for at, group in enumerate(self.groups):
            for column in range(start // group.page_size, end // group.page_size):
                yield at, column, row.parts[at].table.get(column)

    def _named(self, group: int, names: Sequence[int]) -> list[Page]:
        lent_pages: list[Page] = []
        for name in names:
            if not 1 <= name <= self.groups[group].num_pages:
                raise Refused("ShapeError")
            lent = [page for page in self.lent if (page.group, page.number) == (group, name)]
            if not lent:
                raise Refused("PageStateError")
            if lent[0] in lent_pages:
                raise Refused("ShapeError")
            lent_pages += lent
        return lent_pages

    def _check_final(self, row: Row, end: int) -> None:
        if self._first_written(row) < end or self._is_being_copied(row):
            raise Refused("NotReady")

    def _protect(self, row: Row, end: int) -> None:
        for part in row.parts:
            part.protected = max(part.protected, end)
