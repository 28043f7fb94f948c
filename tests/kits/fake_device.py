"""A device that only remembers who wrote each slot: enough to see a page in wrong hands.

Steps run in launch order, but only when the test says so, as on a stream. Each sees the page tables
of its launch (the delta is applied on the stream before the forward).
"""

from __future__ import annotations

import numpy as np

from specpool import Ledger, Plan


class Device:
    """Slots of every group, each `mark * 1000 + position` of the token in it, or 0."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        # int64 [(num_pages + 1) * page_size] per group
        self.slots = [np.zeros((g.num_pages + 1) * g.page_size, np.int64) for g in ledger.groups]
        self.queue: list[tuple[Plan, int, list[np.ndarray], list[int] | None]] = []
        # (step, row): what the forward found below its first position
        self.seen: dict[tuple[int, int], list[int]] = {}

    def launch(self, plan: Plan, mark: int, *, lengths: list[int] | None = None) -> int:
        """Launches the plan and enqueues its forward, which writes `mark`; its step.

        `lengths` are the device's own, per lane; it clamps them into `[lo, hi]`. Default: `lo`.
        """
        self.ledger.launch(plan.step)
        tables = [self.ledger.full_table(g) for g in range(len(self.slots))]
        self.queue.append((plan, mark, tables, lengths))
        return plan.step

    def extend(self, row: int, new_len: int, mark: int) -> int:
        return self.launch(self.ledger.prepare_extend([row], [new_len]), mark)

    def run(self) -> None:
        """Runs everything that is enqueued, and tells the ledger that it is complete."""
        while self.queue:
            plan, mark, tables, lengths = self.queue.pop(0)
            for group, src, dst, tokens in plan.page_copies.tolist():
                P = self.ledger.groups[group].page_size
                slots = self.slots[group]
                slots[dst * P : dst * P + tokens] = slots[src * P : src * P + tokens]
            for lane, row in enumerate(plan.rows.tolist()):
                self._write(plan, lane, row, mark, tables, lengths)
            self.ledger.complete(plan.step)

    def _write(self, plan, lane, row, mark, tables, lengths) -> None:
        first = int(
            np.clip(lengths[lane], plan.lo[lane], plan.hi[lane]) if lengths else plan.lo[lane]
        )
        if plan.kind == "extend":
            positions = np.arange(first, plan.new_len[lane])
        else:
            positions = first + np.arange(self.ledger.shapes[plan.shapes[lane]].num_draft_tokens)
        below = self._slots_at(0, tables[0][row], np.arange(first))
        self.seen[plan.step, row] = self.slots[0][below].tolist()
        for group, table in enumerate(tables):
            self.slots[group][self._slots_at(group, table[row], positions)] = (
                mark * 1000 + positions
            )

    def _slots_at(self, group: int, table_row: np.ndarray, positions: np.ndarray) -> np.ndarray:
        P = self.ledger.groups[group].page_size
        return table_row[positions // P].astype(np.int64) * P + positions % P

    def read(self, row: int, group: int = 0) -> list[int]:
        """What the row's positions `[0, resolved_len)` hold."""
        positions = np.arange(self.ledger.resolved_len[row])
        table = self.ledger.page_table(group)[row]
        return self.slots[group][self._slots_at(group, table, positions)].tolist()


def tokens(*runs: tuple[int, int, int]) -> list[int]:
    """`tokens((1, 0, 4), (2, 4, 6))`: what positions 0..3 of mark 1 and 4..5 of mark 2 hold."""
    return [mark * 1000 + position for mark, first, end in runs for position in range(first, end)]
