"""`StopSearch`: searches a growing text for stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    """A search for the earliest of several strings in a text that comes in pieces (Aho-Corasick).

    The state is a node of the strings' trie: the longest end of the text that begins one of the
    strings. Each character costs O(1), whatever the number and length of the strings.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.hit: StopHit | None = None
        self._children: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._found: list[str | None] = [None]  # the longest string that ends at a node
        for string in strings:
            self._add(string)
        self._fallbacks = self._link()
        self._state = 0
        self._held = ""  # not given out: a string may begin here
        self._position = 0  # characters fed
        self._given = 0  # characters given out
        self._start = 0  # of the earliest string that has been found
        self._earliest: StopHit | None = None

    def _add(self, string: str) -> None:
        node = 0
        for character in string:
            if character not in self._children[node]:
                self._children[node][character] = len(self._children)
                self._children.append({})
                self._depths.append(self._depths[node] + 1)
                self._found.append(None)
            node = self._children[node][character]
        self._found[node] = string

    def _link(self) -> list[int]:
        """Return, for each node, the node of its longest proper suffix; breadth first."""
        fallbacks = [0] * len(self._children)
        nodes = [0]
        for node in nodes:
            for character, child in self._children[node].items():
                if node:
                    fallbacks[child] = self._step(fallbacks, fallbacks[node], character)
                self._found[child] = self._found[child] or self._found[fallbacks[child]]
                nodes.append(child)
        return fallbacks

    def _step(self, fallbacks: list[int], node: int, character: str) -> int:
        while node and character not in self._children[node]:
            node = fallbacks[node]
        return self._children[node].get(character, 0)

    def feed(self, text: str, ends: Sequence[int]) -> str:
        """Search the next piece, and return the text that cannot be part of a stop string.

        Args:
            text: the next piece.
            ends: for each character, the number of pushed tokens when it is complete.
        """
        if self.hit is not None:
            return ""
        self._held += text
        for character, num_tokens in zip(text, ends, strict=True):
            self._state = self._step(self._fallbacks, self._state, character)
            self._position += 1
            found = self._found[self._state]
            if found is not None:
                start = self._position - len(found)
                if self._earliest is None or start < self._start:
                    self._start, self._earliest = start, StopHit(found, num_tokens)
            # A longer string may have begun before the one that has been found.
            if self._earliest is not None and self._begun() >= self._start:
                return self.finish()
        return self._give(self._begun())

    def finish(self) -> str:
        """End the text; return the text held back, up to the stop string if there is one."""
        self.hit = self._earliest
        return self._give(self._position if self.hit is None else self._start)

    def _begun(self) -> int:
        """Return the position of the earliest string that may have begun."""
        return self._position - self._depths[self._state]

    def _give(self, end: int) -> str:
        given, self._held = self._held[: end - self._given], self._held[end - self._given :]
        self._given = end
        return given
