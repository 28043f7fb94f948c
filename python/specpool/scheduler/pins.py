"""`Pins`: texts whose KV is kept for requests that begin with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specpool._core import Ledger
from specpool.errors import SpecpoolError


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A text whose KV is kept for requests that begin with it; another engine's is another."""

    prefix: int  # the ledger's number
    tokens: list[int]  # of whole pages


class Pins:
    """The pinned texts, the oldest first."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._pins: list[Pin] = []

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins)

    def __len__(self) -> int:
        return len(self._pins)

    def take(self, row: int, tokens: list[int]) -> Pin:
        """Hold the whole pages of what the row has of these tokens, until `keep` is called.

        Two calls, so that a request knows its pin before the pins do: Ctrl-C may come at any line,
        and `recover` gives back what the pins do not know.

        Raises:
            ShapeError: they fill no page.
            NotReady: a window below is gone.
        """
        prefix = self._ledger.pin_prefix(row, len(tokens))
        return Pin(prefix, tokens[: self._ledger.prefix_len(prefix)])

    def keep(self, pin: Pin) -> None:
        """Keep what was taken, for every request that begins with it."""
        self._pins.append(pin)

    def drop(self, pin: Pin) -> None:
        """Keep a text's pages no longer; twice is once."""
        if pin in self._pins:
            self._pins.remove(pin)
            self._ledger.release_prefix(pin.prefix)

    def drop_oldest(self) -> None:
        """Its pages are needed."""
        self.drop(self._pins[0])

    def drop_all(self) -> list[str]:
        """Keep no text any longer; returns what the ledger refused to take back."""
        failures = []
        for pin in list(self._pins):
            try:
                self.drop(pin)
            except SpecpoolError as error:
                failures.append(f"the pinned prefix {pin.prefix}: {error}")
        return failures

    def shared_with(self, tokens: list[int]) -> list[tuple[Pin, int]]:
        """Texts that `tokens` begin with, and how many do: most first, never the last."""
        found = []
        for pin in self._pins:
            shared = min(len(pin.tokens), len(tokens) - 1)
            if shared > 0 and pin.tokens[:shared] == tokens[:shared]:
                found.append((pin, shared))
        return sorted(found, key=lambda each: -each[1])

    def recover(self) -> None:
        """Ctrl-C came between any two calls: one may have been on its way in or out."""
        for prefix in set(self._ledger.prefixes).difference(pin.prefix for pin in self._pins):
            self._ledger.release_prefix(prefix)
