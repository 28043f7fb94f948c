"""`StopSearch`: searches a growing text for stop strings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from specpool.checks import shown
from specpool.errors import ConfigError

#: The most stop strings of one request.
MAX_STOP_STRINGS = 64


def check_stop(stop: object) -> None:
    """Raise `ConfigError` unless `stop` is a tuple of at most `MAX_STOP_STRINGS` valid strings."""
    if not isinstance(stop, tuple | list):
        raise ConfigError(f"stop must be a tuple of strings, got {shown(stop)}")
    if len(stop) > MAX_STOP_STRINGS:
        raise ConfigError(
            f"stop must be at most {MAX_STOP_STRINGS} strings, got {len(stop)}: {shown(stop)}"
        )
    for string in stop:
        if not isinstance(string, str) or not string:
            raise ConfigError(f"stop must hold strings that are not empty, got {shown(string)}")
        try:
            string.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"stop must hold valid text, got a lone surrogate at position {error.start} of "
                f"{shown(string)}"
            ) from None


@dataclass(frozen=True, slots=True)
class StopHit:
    """The stop string that ended a text.

    Attributes:
        stop: the string.
        num_tokens: the number of pushed tokens up to and with the one that completed the string.
            Later tokens are not part of the output, but may have been needed to decide.
    """

    stop: str
    num_tokens: int


class StopSearch:
    """A search for the earliest of several strings in a text that comes in pieces.

    It holds back only the end of the text that may be the beginning of a string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.hit: StopHit | None = None
        self._strings = sorted(strings, key=len)
        self._by_first: defaultdict[str, list[str]] = defaultdict(list)  # by their first character
        for string in strings:
            self._by_first[string[0]].append(string)
        self._held = ""  # not returned yet, because a string may begin in it
        self._ends: list[int] = []  # for each character held, the tokens pushed when it is complete
        # The start of the earliest string in `_held`, and the length of the shortest one there.
        self._found: tuple[int, int] | None = None

    def feed(self, text: str, ends: Sequence[int]) -> str:
        """Search the next piece, and return the text that cannot be part of a stop string.

        Args:
            text: the next piece.
            ends: for each character, the number of pushed tokens when it is complete.
        """
        if self.hit is not None:
            return ""
        self._held += text
        self._ends += ends
        self._look(text)
        end = len(self._held) if self._found is None else self._found[0]
        begun = self._begun(end)
        if self._found is not None and begun == end:
            return self.close()
        return self._give(begun)  # a longer string may have begun before `_found`

    def close(self) -> str:
        """End the text; return the text held back, up to the stop string if there is one."""
        if self._found is None:
            return self._give(len(self._held))
        start, length = self._found
        self.hit = StopHit(self._held[start : start + length], self._ends[start + length - 1])
        return self._give(start)

    def _look(self, new: str) -> None:
        """Find the earliest string that ends in `new`, the newest part of the held text."""
        for string in self._strings:
            if len(string) > len(self._held):
                break
            if string[-1] not in new:  # as a rule; `find` would read all of a long string first
                continue
            start = self._held.find(string, max(0, len(self._held) - len(new) - len(string) + 1))
            if start >= 0 and (self._found is None or start < self._found[0]):
                self._found = start, len(string)

    def _begun(self, end: int) -> int:
        """Return the first place before `end` where an unfinished string may begin; else `end`."""
        for start, character in enumerate(self._held[:end]):
            if character in self._by_first:
                tail = self._held[start:]
                if any(string.startswith(tail) for string in self._by_first[character]):
                    return start
        return end

    def _give(self, end: int) -> str:
        given, self._held = self._held[:end], self._held[end:]
        del self._ends[:end]
        if self._found is not None:
            self._found = self._found[0] - end, self._found[1]
        return given
