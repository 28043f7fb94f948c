"""`Pins`: the pinned texts, whose KV is kept for requests that begin with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from specpool._core import Ledger
from specpool.errors import SpecpoolError


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A pinned text. It belongs to one engine."""

    prefix: int  # its number in the ledger
    tokens: list[int]  # of whole pages; of a row with a recurrent state, those in the state


class Pins:
    """The pinned texts, the oldest first."""

    def __init__(self, ledger: Ledger, export: Callable[[int], int]) -> None:
        """Start without pins; `export` is as in `Rows`."""
        self._ledger, self._export = ledger, export
        self._pins: list[Pin] = []

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins)

    def __len__(self) -> int:
        return len(self._pins)

    def take(self, row: int, tokens: list[int]) -> Pin:
        """Hold the whole pages of the row's first tokens in the ledger; `keep` comes next.

        A row with a recurrent state is given back, and its pages and its state are held.

        There are two calls, so that the request has its pin before the pins know it. Ctrl-C may
        come at any line, and `recover` releases every prefix that the pins do not know.

        Raises:
            ShapeError: the tokens fill no page.
            NotReady: the window below the text's end is not held any more, or there is no state.
        """
        if self._ledger.states:
            prefix = self._export(row)
        else:
            prefix = self._ledger.pin_prefix(row, len(tokens))
        return Pin(prefix, tokens[: self._ledger.prefix_len(prefix)])

    def keep(self, pin: Pin) -> None:
        """Add a taken pin, for every request that begins with its text."""
        self._pins.append(pin)

    def drop(self, pin: Pin) -> None:
        """Release a text's pages. A second call does nothing."""
        if pin in self._pins:
            self._pins.remove(pin)
            self._ledger.release_prefix(pin.prefix)

    def drop_oldest(self) -> None:
        """Drop the oldest pin, because its pages are needed."""
        self.drop(self._pins[0])

    def drop_all(self) -> list[str]:
        """Drop all pins; return a message for each prefix that the ledger refused to take back."""
        failures = []
        for pin in list(self._pins):
            try:
                self.drop(pin)
            except SpecpoolError as error:
                failures.append(f"the pinned prefix {pin.prefix}: {error}")
        return failures

    def shared_with(self, tokens: list[int]) -> list[tuple[Pin, int]]:
        """Return the pins that `tokens` begin with and their shared lengths, longest first.

        The last token is never shared, because its forward gives the first output token. A text
        with a recurrent state is shared as a whole, or not at all.
        """
        pins = []
        for pin in self._pins:
            shared = min(len(pin.tokens), len(tokens) - 1)
            is_cut = bool(self._ledger.states) and shared < len(pin.tokens)
            if shared > 0 and not is_cut and pin.tokens[:shared] == tokens[:shared]:
                pins.append((pin, shared))
        return sorted(pins, key=lambda pair: -pair[1])

    def recover(self, prefixes: Collection[int]) -> None:
        """Release every prefix that no pin has and that is not in `prefixes`, after Ctrl-C."""
        known = {*prefixes, *(pin.prefix for pin in self._pins)}
        for prefix in set(self._ledger.prefixes).difference(known):
            self._ledger.release_prefix(prefix)
