"""`Indexed`: what the prefix index of a ledger has, read entry by entry."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lab.sim.device import Ints
from specpool._core import Ledger


@dataclass(frozen=True, slots=True)
class _Path:
    """The tokens of an entry and of all entries before it."""

    salt: bytes
    tokens: list[int]
    drafted_len: int  # draft KV is valid below this


class Indexed:
    """A plain record of the texts in a ledger's index.

    Args:
        ledger: the ledger.
        is_on: whether the index is used; if not, it is empty and nothing is read.
    """

    def __init__(self, ledger: Ledger, *, is_on: bool) -> None:
        self._ledger, self.is_on = ledger, is_on
        self._paths: list[_Path] = []
        self._size = (0, 0, 0)
        self._looked_twice = False

    def look(self) -> None:
        """Read the texts."""
        self._paths, self._looked_twice = [], False
        self._read()

    def look_again(self) -> None:
        """Read the texts, and keep those of the last look."""
        self._looked_twice = True
        self._read()

    def _read(self) -> None:
        path, has_draft = list[int](), list[bool]()
        for salt, start, tokens, drafted, _ in self._ledger.index_entries() if self.is_on else ():
            path[start:] = tokens.tolist()
            has_draft[start:] = [i < drafted for i in range(len(tokens))]
            drafted_len = [*has_draft, False].index(False)
            self._paths.append(_Path(salt, list(path), drafted_len))
        self._size = self._ledger.index_size

    @property
    def has_changed(self) -> bool:
        """Whether something was added or given up since `look`."""
        return self._looked_twice or self._size != self._ledger.index_size

    def known_len(self, tokens: list[int], salt: bytes, *, needs_draft: bool) -> int:
        """Return how many of the tokens had KV when it was read: at most all but the last."""
        best = 0
        for path in self._paths:
            if path.salt != salt:
                continue
            max_len = min(len(path.tokens), len(tokens) - 1)
            if needs_draft:
                max_len = min(max_len, path.drafted_len)
            if max_len > best:
                best = max(best, _common_len(path.tokens, tokens, max_len))
        return best

    def pages(self, g: int) -> Ints:
        """Return the group's pages in the index now, ascending; no page is there twice."""
        entries = self._ledger.index_entries() if self.is_on else []
        pages = [pages[g] for *_, pages in entries]
        all_pages = np.concatenate([np.zeros(0, np.int64), *pages])
        return np.sort(all_pages[all_pages > 0])


def _common_len(a: list[int], b: list[int], max_len: int) -> int:
    """Return how many of the first `max_len` tokens both begin with."""
    if a[:max_len] == b[:max_len]:
        return max_len
    return next(i for i in range(max_len) if a[i] != b[i])
