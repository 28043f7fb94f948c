"""`StopSearch`: searches a growing text for stop strings. `VeiledSearch`: one with hidden parts."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
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

    Attributes:
        hit: the string that ended the text; None if none has yet.
        num_given: characters returned so far; after a hit, those before its string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.hit: StopHit | None = None
        self.num_given = 0
        self._strings = sorted(strings, key=len)
        self._by_first: defaultdict[str, list[str]] = defaultdict(list)  # by their first character
        for string in strings:
            self._by_first[string[0]].append(string)
        self._held = ""  # not returned yet, because a string may begin in it
        self._ends: list[int] = []  # for each character held, the tokens pushed when it is complete
        # The start of the earliest string in `_held`, and the length of the shortest one there.
        self._match_span: tuple[int, int] | None = None

    @property
    def num_held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    @property
    def is_undecided(self) -> bool:
        """Whether a string has come, but a longer one that began before it may yet."""
        return self.hit is None and self._match_span is not None

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
        end = len(self._held) if self._match_span is None else self._match_span[0]
        begun = self._begun_string_start(end)
        if self._match_span is not None and begun == end:
            return self.close()
        return self._release(begun)  # a longer string may have begun before `_match_span`

    def close(self) -> str:
        """End the text; return the text held back, up to the stop string if there is one."""
        if self._match_span is None:
            return self._release(len(self._held))
        start, length = self._match_span
        self.hit = StopHit(self._held[start : start + length], self._ends[start + length - 1])
        return self._release(start)

    def _look(self, new: str) -> None:
        """Find the earliest string that ends in `new`, the newest part of the held text."""
        for string in self._strings:
            if len(string) > len(self._held):
                break
            if string[-1] not in new:  # as a rule; `find` would read all of a long string first
                continue
            start = self._held.find(string, max(0, len(self._held) - len(new) - len(string) + 1))
            if start >= 0 and (self._match_span is None or start < self._match_span[0]):
                self._match_span = start, len(string)

    def _begun_string_start(self, end: int) -> int:
        """Return the first place before `end` where an unfinished string may begin; else `end`."""
        for start, character in enumerate(self._held[:end]):
            if character in self._by_first:
                tail = self._held[start:]
                if any(string.startswith(tail) for string in self._by_first[character]):
                    return start
        return end

    def _release(self, end: int) -> str:
        output, self._held = self._held[:end], self._held[end:]
        del self._ends[:end]
        self.num_given += end
        if self._match_span is not None:
            self._match_span = self._match_span[0] - end, self._match_span[1]
        return output


class VeiledSearch:
    """A search in a text of which parts are hidden, such as the names of special tokens.

    It searches the text with its hidden parts and without them. The string that begins first ends
    the text; the hidden parts are never returned.

    Attributes:
        hit: the string that ended the text; None if none has yet.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.hit: StopHit | None = None
        self._shown = StopSearch(strings)  # the text without hidden parts
        self._whole: StopSearch | None = None  # with them; None if nothing held is hidden
        self._spans: deque[tuple[int, int]] = deque()  # hidden in `_whole`: first place and length
        self._num_hidden = 0  # characters of older spans
        self._held = ""  # shown text that one of the searches holds back
        self._num_given = 0  # shown characters returned so far

    def feed(self, text: str, ends: Sequence[int]) -> str:
        """Search the next piece that is shown; see `StopSearch.feed`."""
        if self.hit is not None:
            return ""
        self._held += text
        self._shown.feed(text, ends)
        if self._whole is not None:
            self._whole.feed(text, ends)
        return self._settle()

    def hide(self, text: str, end: int) -> str:
        """Search the next piece that is hidden; return shown text that was held back until now.

        Args:
            text: the next piece.
            end: the number of pushed tokens with the one that it belongs to.
        """
        if self.hit is not None:
            return ""
        if self._whole is None:
            self._whole = copy.deepcopy(self._shown)
            self._spans, self._num_hidden = deque(), 0
        self._spans.append((self._whole.num_given + self._whole.num_held, len(text)))
        self._whole.feed(text, [end] * len(text))
        return self._settle()

    def close(self) -> str:
        """End the text; return the text held back, up to the stop string if there is one."""
        if self.hit is not None:
            return ""
        self._shown.close()
        if self._whole is not None:
            self._whole.close()
        return self._settle()

    def _settle(self) -> str:
        """Return the shown text that both searches have given, and take over a hit that is final.

        A hit is final unless the other search still holds text from before it. The names of hidden
        tokens may be such text, so a hit waits too while the search of the whole text is undecided.
        """
        whole, shown_len = self._whole, self._shown.num_given
        whole_len = shown_len if whole is None else self._shown_part(whole.num_given)
        end = min(shown_len, whole_len)
        output, self._held = (
            self._held[: end - self._num_given],
            self._held[end - self._num_given :],
        )
        self._num_given = end
        hits = [(shown_len, self._shown.hit), (whole_len, None if whole is None else whole.hit)]
        final = [hit for start, hit in hits if hit is not None and start == end]
        if final and not (whole is not None and whole.is_undecided):
            self.hit = min(final, key=lambda hit: (hit.num_tokens, len(hit.stop)))
        elif whole is not None and not self._held and not whole.num_held:
            self._whole = None  # from here on both texts are the same
        return output

    def _shown_part(self, num_whole: int) -> int:
        """Return how many of the first characters of the whole text are shown."""
        while self._spans and sum(self._spans[0]) <= num_whole:
            self._num_hidden += self._spans.popleft()[1]
        start, length = self._spans[0] if self._spans else (num_whole, 0)
        return num_whole - self._num_hidden - min(max(num_whole - start, 0), length)
