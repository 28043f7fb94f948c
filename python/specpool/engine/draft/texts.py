"""`TextIndexes`: the indexes of the texts that a drafter searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

#: An index that was not used in this many turns is dropped. A turn begins with each `propose`, and
#: when the same text is looked at a second time in a turn.
KEPT_CALLS = 16
#: Tokens at the end of an index that are compared before it is used again.
TAIL_LEN = 64


class TextIndex(Protocol):
    """An index of one text, which grows with it."""

    def extend(self, text: Sequence[int], begin: int) -> None:
        """Index the tokens of the text from `begin` on; those before are indexed."""

    def drop(self) -> None:
        """Forget the text."""


Index = TypeVar("Index", bound=TextIndex)


@dataclass(slots=True)
class _Entry(Generic[Index]):
    text: Sequence[int]  # a reference, so that no other list gets its id
    index: Index
    num_indexed: int = 0
    tail: list[int] = field(default_factory=list)  # the last `TAIL_LEN` indexed tokens
    last_call: int = 0

    def is_current(self) -> bool:
        """Return whether the text has only grown, judged by its last `TAIL_LEN` indexed tokens.

        A change that this check misses must cost proposals at most, never make a wrong one.
        """
        begin = self.num_indexed - len(self.tail)
        return list(self.text[begin : self.num_indexed]) == self.tail


class TextIndexes(Generic[Index]):
    """One index for each text; a text is known by the list that holds it.

    Another list is indexed anew, and so is a list whose last indexed tokens have changed.
    """

    def __init__(self, new: Callable[[], Index]) -> None:
        """Start without texts; `new` makes an empty index."""
        self._new = new
        self._entries: dict[int, _Entry[Index]] = {}  # by the id of the list
        self._num_calls = 0

    def index(self, text: Sequence[int]) -> Index:
        """Return the index of a text, up to date."""
        entry = self._entries.get(id(text))
        if entry is not None and not entry.is_current():
            entry.index.drop()
            entry = None
        if entry is None:
            entry = self._entries[id(text)] = _Entry(text, self._new())
        elif entry.last_call == self._num_calls:  # the text again: a new turn begins
            self.begin_turn()
        entry.last_call = self._num_calls
        if len(text) > entry.num_indexed:
            entry.index.extend(text, entry.num_indexed)
            entry.num_indexed, entry.tail = len(text), list(text[-TAIL_LEN:])
        return entry.index

    def begin_turn(self) -> None:
        """Begin a turn, and drop the indexes that were not used in the last `KEPT_CALLS` turns."""
        self._num_calls += 1
        for key, entry in list(self._entries.items()):
            if self._num_calls - entry.last_call >= KEPT_CALLS:
                entry.index.drop()
                del self._entries[key]
