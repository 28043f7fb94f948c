"""The oracle's verbs for rows that move to another ledger, from docs/contract.md alone."""

from __future__ import annotations

from typing import Any

from oracle_state import Part, Prefix, Refused, Row, State
from reference import ceil_align


class Moving(State):
    """`export` and `import_row`; `Oracle` has the parts that they use."""

    _row: Any
    _take: Any
    _check_pages: Any
    _check_free_row: Any
    _is_being_copied: Any
    _fork_len: Any
    give_back: Any

    def export(self, row: int) -> int:
        state = self._row(row)
        if state.resolved == 0:
            raise Refused("ShapeError")
        if state.rounds or state.extend_from is not None or state.last_launched > self.completed:
            raise Refused("NotReady")
        if self._is_being_copied(state):
            raise Refused("NotReady")
        length = self._fork_len(state)
        needed = [self._needed(group, length) for group in self._all]
        held = zip(needed, state.parts, strict=True)
        if length == 0 or not all(columns <= part.table.keys() for columns, part in held):
            raise Refused("NotReady")
        tables = [
            {at: page for at, page in part.table.items() if at in needed[group]}
            for group, part in enumerate(state.parts)
        ]
        for table in tables:
            for page in table.values():
                page.shared = True
        evicted = [self._evict_to(at, length) for at in self._all]
        prefix, drafted = self.next_prefix, min(state.drafted, length)
        self.prefixes[prefix] = Prefix(length, drafted, tables, evicted)
        self.next_prefix += 1
        self.give_back(row)
        return prefix

    def _check_free_slot(self) -> None:
        """A row that arrives needs pages alone."""

    def import_row(self, length: int, drafted_len: int) -> Row:
        if not 1 <= length <= self.context or not 0 <= drafted_len <= length:
            raise Refused("ShapeError")
        self._check_free_row()
        columns = [self._needed(at, length) for at in self._all]
        self._check_pages(map(len, columns), [])
        self._check_free_slot()
        row = Row(0, [], resolved=length, drafted=drafted_len)
        for at, group in enumerate(self.groups):
            part = Part({column: self._take(at) for column in sorted(columns[at])})
            part.allocated = ceil_align(length, group.page_size)
            part.evicted = self._evict_to(at, length)
            row.parts.append(part)
        return row
