"""A ledger that records, and a small server's day on it."""

from __future__ import annotations

import random
from pathlib import Path

from specpool import (
    Group,
    Ledger,
    Shape,
)

TREE, CHAIN = Shape.eagle(2, 2, 4), Shape.eagle(3, 1, 4)


def build(path: Path | None, **options) -> Ledger:
    groups = [
        Group("target", page_size=4, num_pages=60),
        Group("draft", page_size=2, num_pages=160, hosts_drafts=True, layout="holey"),
        Group("window", page_size=2, num_pages=80, window=5, sink=3),
    ]
    options = {"num_rows": 4, "max_context_len": 48, "overlap_depth": 1, **options}
    return Ledger(groups, [TREE, CHAIN], record=path, **options)


def serve(ledger: Ledger, rounds: int = 6, seed: int = 0) -> None:
    """A small server's day: prefixes, forks, rounds under overlap, cancels, cuts, retractions."""
    rng = random.Random(seed)
    rows = [ledger.admit("first"), ledger.admit()]

    def extend(batch: list[int], lens: list[int]) -> None:
        plan = ledger.prepare_extend(batch, lens)
        ledger.launch(plan.step)
        ledger.complete(plan.step)

    extend(rows, [9, 14])
    prefix = ledger.pin_prefix(rows[1], 10)
    rows += [ledger.admit("on a prefix", prefix=prefix, length=7), ledger.fork(rows[0], "gabel")]
    extend(rows[2:], [12, 11])
    waiting = []
    for turn in range(rounds):
        batch = [row for row in rows if ledger.resolved_len[row] < 40]
        shapes = [rng.randrange(3) for _ in batch]
        plan = ledger.prepare_decode(batch, shapes)
        if turn == 2:
            ledger.cancel(plan.step)
            plan = ledger.prepare_decode(batch, shapes)
        ledger.launch(plan.step)
        waiting.append(plan)
        if len(waiting) == 2 or turn == rounds - 1:
            for done in waiting[: 2 if turn == rounds - 1 else 1]:
                lens = [
                    rng.randint(1, ledger.shapes[shape].max_accept_len) for shape in done.shapes
                ]
                ledger.resolve(done.step, lens)
                ledger.complete(done.step)
            waiting = waiting[1:] if turn < rounds - 1 else []
    ledger.trim(rows[2], 8)
    ledger.retract(rows[3])
    ledger.release_prefix(prefix)
    snapshot = ledger.snapshot()
    ledger.finish(rows[0])
    ledger.restore(snapshot)
    ledger.abort(rows[1])
