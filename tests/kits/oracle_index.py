"""The oracle's prefix index: what it finds follows from what it holds.

What the index holds is told from outside after each operation, as page numbers are: the Rust tests
of the prefix cache check it. What follows from it is not told: which pages are cached, what a claim
can have, how far a text is known, and which pages a hit shares.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any, TypeAlias

from oracle import Oracle
from oracle_state import Page, Refused, Row

Text: TypeAlias = tuple[int, ...]
# `Ledger.index_entries()`: salt, start, tokens, drafted, pages of each group.
Seen: TypeAlias = Sequence[tuple[bytes, int, Any, int, Any]]

MAX_SALT = 256


@dataclass(eq=False)
class Entry:
    """One entry, with the whole text up to its end."""

    salt: bytes
    start: int
    text: Text
    drafted: int
    pages: list[list[int]]

    @property
    def tokens(self) -> Text:
        return self.text[self.start :]

    @property
    def before(self) -> tuple[bytes, Text]:
        """What it stands behind."""
        return self.salt, self.text[: self.start]


@dataclass
class Match:
    """A path of entries that begin as some tokens do."""

    path: list[Entry]
    known: int  # Tokens.


def common(left: Text, right: Text) -> int:
    """How many tokens two texts begin with in common."""
    pairs = zip(left, right, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    return min(len(left), len(right)) if same is None else same


class IndexOracle(Oracle):
    """The ledger with its prefix index."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.entries: list[Entry] = []
        span = lcm(*(group.page_size for group in self.groups))
        self.span = span if span <= self.context else self.context

    # --- What is told ---

    def observe_losses(self, seen: Seen) -> None:
        """The index holds these entries; pages that it gave up may be other pages by now."""
        held = {
            (at, int(page))
            for *_, pages in seen
            for at, line in enumerate(pages)
            for page in line.tolist()
        }
        self.indexed = {page for page in self.indexed if (page.group, page.number) in held}
        self._sweep()

    def observe_gains(self, seen: Seen) -> None:
        """The index holds these entries, of pages that all have numbers."""
        by_number = {(page.group, page.number): page for page in self.pages}
        self.entries, text = [], ()
        for salt, start, tokens, drafted, pages in seen:
            text = (*text[:start], *tokens.tolist())
            lines = [line.tolist() for line in pages]
            self.entries.append(Entry(salt, start, text, drafted, lines))
            self.indexed |= {
                by_number[at, page] for at, line in enumerate(lines) for page in line if page
            }
        for page in self.indexed:
            page.shared = True

    def observe_protected(self, row: int, protected: Sequence[int], known: int) -> None:
        """`index` made the row's pages read-only up to here."""
        state = self.rows[row]
        for at, (part, length) in enumerate(zip(state.parts, protected, strict=True)):
            assert part.protected <= length <= max(part.protected, known), (row, at, length)
            part.protected = length
            end = -(-length // self.groups[at].page_size)
            for column, page in (*part.table.items(), *part.kept.items()):
                page.shared = page.shared or column < end

    # --- The verbs ---

    def _check_salt(self, salt: bytes) -> None:
        if len(salt) > MAX_SALT:
            raise Refused("ShapeError")

    def index(self, row: int, tokens: Sequence[int], salt: bytes = b"") -> None:
        state = self._row(row)
        if not 1 <= len(tokens) <= state.resolved:
            raise Refused("ShapeError")
        self._check_salt(salt)
        if self._first_written(state) < len(tokens) or self._is_being_copied(state):
            raise Refused("NotReady")

    def forget(self, salt: bytes | None = None) -> None:
        self._check_salt(salt or b"")

    def is_known(self, salt: bytes, text: Text) -> bool:
        """Whether the KV of the whole text is in the index."""
        return any(entry.salt == salt and entry.text[: len(text)] == text for entry in self.entries)

    def _match(self, tokens: Text, salt: bytes) -> Match:
        """Follow the entries; of two that agree with as many tokens, the greater one."""
        path: list[Entry] = []
        known = 0
        while known == len(path) * self.span:
            rest = tokens[known:]
            children = [it for it in self.entries if it.before == (salt, tokens[:known])]
            children.sort(key=lambda entry: entry.tokens)
            index = bisect_left([entry.tokens for entry in children], rest)
            beside = children[max(0, index - 1) : index + 1]
            if not rest or not beside:
                break
            nearest = max(beside, key=lambda it: (common(it.tokens, rest), it.tokens))
            path.append(nearest)
            known += common(nearest.tokens, rest)
        return Match(path, known)

    def _limit(self, tokens: Sequence[int], limit: int | None) -> int:
        longest = min(len(tokens), self.context)
        if limit is None:
            return min(max(len(tokens) - 1, 0), longest)
        if not 0 <= limit <= longest:
            raise Refused("ShapeError")
        return limit

    def _page_at(self, match: Match, at: int, column: int) -> Page | None:
        size = self.groups[at].page_size
        level, entry_column = divmod(column, -(-self.span // size))
        number = match.path[level].pages[at][entry_column]
        return next(
            (page for page in self.indexed if (page.group, page.number) == (at, number)), None
        )

    def _drafted_of(self, match: Match) -> int:
        drafted = 0
        for entry in match.path:
            drafted += entry.drafted
            if entry.drafted < len(entry.tokens):
                break
        return min(drafted, match.known)

    def _hit_len(self, match: Match, tokens: Text, salt: bytes) -> int:
        """Tokens of the row that begins on the match."""
        raise NotImplementedError

    def _has_windows(self, match: Match, length: int) -> bool:
        return all(
            self._page_at(match, at, column) is not None
            for at in self._all
            for column in self._needed(at, length)
        )

    def admit_cached(
        self,
        tokens: Sequence[int],
        salt: bytes = b"",
        limit: int | None = None,
        needs_draft: bool = False,
    ) -> Row:
        assert not needs_draft, "the oracle does not know how far draft KV goes on other paths"
        self._check_salt(salt)
        text = tuple(tokens[: self._limit(tokens, limit)])
        match = self._match(text, salt)
        length = self._hit_len(match, text, salt)
        self._check_free_row()
        tables: list[dict[int, Page]] = []
        for at, group in enumerate(self.groups):
            first = self._evict_to(at, length) // group.page_size
            columns = range(-(-length // group.page_size))
            pages = {
                column: self._page_at(match, at, column)
                for column in columns
                if column >= first or column in self._sinks(at)
            }
            tables.append({column: page for column, page in pages.items() if page})
        evicted = [self._evict_to(at, length) for at in self._all]
        return self._share(tables, evicted, length, self._drafted_of(match))
