"""`SimStates`: the state slots and rings of a simulated device, which know whose text they hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lab.sim.arrivals import Text
from lab.sim.broken_law import BrokenLaw
from specpool._core import Ledger, Plan

Ints = npt.NDArray[np.int64]


def ring_len_of(ledger: Ledger) -> int:
    """Return the records that each row's ring holds."""
    return ledger.state_ring_len(0)


class SimStates:
    """The slots, each with the word of its state's last token, and each row's ring of words.

    A word says whose text it is and where (see `Text.words`), so it stands for all tokens before.

    Args:
        ledger: the ledger of the steps.
    """

    def __init__(self, ledger: Ledger) -> None:
        (group,) = ledger.states
        self._slots = np.zeros(group.num_slots + 1, np.int64)
        self._ring_len = ring_len_of(ledger)
        self._rings = np.zeros((ledger.num_rows + 1, self._ring_len), np.int64)

    def run(
        self, plan: Plan, lane: int, text: Text, *, root: int, width: int, keep: int, broken: bool
    ) -> None:
        """Run a lane whose own tokens are those of `[root, root + width)`, the first `keep` right.

        A round records its nodes before it reads older records, an extend reads first. What a
        `broken` row leaves is nobody's text.
        """
        src, dst = int(plan.state_src[0, lane]), int(plan.state_dst[0, lane])
        begin, end = int(plan.state_from[0, lane]), int(plan.state_to[0, lane])
        row, words = int(plan.rows[lane]), text.words
        ring, name = self._rings[row], f"step {plan.step}, row {row}"
        if broken:
            self._slots[dst] = -plan.step if dst else 0
            ring[:] = -plan.step
            return
        if (held := self._slots[src]) != (words[begin - 1] if begin else 0):
            raise BrokenLaw(
                f"{name} reads slot {src} as the state of {begin} tokens, it holds position "
                f"{held & (1 << 20) - 1} of request {held >> 20}"
            )
        if end > root + keep or (end > root and width > 1 and plan.kind == "decode"):
            raise BrokenLaw(f"{name} folds up to {end}, beyond its root {root}")
        older, own = np.arange(begin, root), np.arange(max(root, end), root + width)
        own_words = np.where(own < root + keep, words[own], -plan.step)
        if plan.kind == "decode":
            ring[own % self._ring_len] = own_words
        wrong = ring[older % self._ring_len] != words[older]
        if wrong.any():
            raise BrokenLaw(f"{name} reads positions {older[wrong]} in its ring, others are there")
        ring[own % self._ring_len] = own_words
        if bool(dst) != (end > begin):
            raise BrokenLaw(f"{name} folds {begin} .. {end} and writes slot {dst}")
        if dst:
            self._slots[dst] = words[end - 1]
