"""`SimEngine`: a replica's engine: the real ledger, and texts that a hash makes."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from lab.fleet.world import FleetLaw
from specpool._core import Group, Ledger, Shape, sizing_row_width
from specpool.errors import OutOfPages, OutOfRows

MAX_CONTEXT_LEN = 192
BATCH = 8
_PAGE_SIZE = 16
_SHAPE = Shape.eagle(3, 1, 4)
_VOCAB = 1 << 16


def next_token(tokens: Sequence[int]) -> int:
    """Return the token that follows a text: any difference in the text changes it."""
    return hash(tuple(tokens)) % _VOCAB


def answer_of(tokens: Sequence[int], num_new: int) -> list[int]:
    """Return what a text goes on with, as any engine says it."""
    text = list(tokens)
    for _ in range(num_new):
        text.append(next_token(text))
    return text[len(tokens) :]


@dataclass(eq=False, slots=True)
class Work:
    """A text that waits or runs."""

    ids: list[int]
    num_new: int
    done: Callable[[list[int]], None]
    session: int | None = None
    num_history: int = 0  # tokens of the session before this turn
    new: list[int] = field(default_factory=list)
    row: int = 0


class SimEngine:
    """What `Sessions` calls, and the rounds of the running texts."""

    def __init__(self, rng: random.Random, max_sessions: int) -> None:
        self._random = rng
        rows = BATCH + max_sessions
        width = sizing_row_width(
            [_SHAPE], page_size=_PAGE_SIZE, max_context_len=MAX_CONTEXT_LEN, hosts_drafts=True
        )
        pages = rows * width // _PAGE_SIZE
        group = Group("kv", page_size=_PAGE_SIZE, num_pages=pages, hosts_drafts=True)
        self._ledger = Ledger(
            [group], [_SHAPE], num_rows=rows, max_context_len=MAX_CONTEXT_LEN, sessions=True
        )
        self.ready = SimpleNamespace(max_context_len=MAX_CONTEXT_LEN, max_batch=BATCH, model_key="")
        self._rows: dict[int, int] = {}  # session -> its row; 0 if none yet
        self._next = 1
        self.waiting: deque[Work] = deque()
        self.running: list[Work] = []

    @property
    def num_open(self) -> int:
        """The texts that wait or run."""
        return len(self.waiting) + len(self.running)

    async def call(self, verb: str, *args: Any, timeout: float | None = None) -> Any:
        """Do what `Runner` does; it never waits here."""
        return getattr(self, f"_{verb}")(*args)

    def abort(self, work: Work) -> None:
        """Drop a text; its session's row stays as the last turn left it."""
        if work in self.waiting:
            self.waiting.remove(work)
        elif work in self.running:
            self.running.remove(work)
            self._leave(work, work.num_history)

    def round(self) -> None:
        """Let every running text go on by a prefill or a round."""
        while self.waiting and len(self.running) < BATCH:
            self._begin(self.waiting.popleft())
        deciding = [work for work in self.running if work.new]
        if deciding:
            plan = self._ledger.prepare_decode([w.row for w in deciding], [1] * len(deciding))
            self._ledger.launch(plan.step)
            max_lens = [min(4, work.num_new - len(work.new)) for work in deciding]
            lens = [self._random.randint(1, max_len) for max_len in max_lens]
            self._ledger.resolve(plan.step, lens)
            self._ledger.complete(plan.step)
            for work, number in zip(deciding, lens, strict=True):
                for _ in range(number):
                    work.new.append(next_token(work.ids + work.new))
        for work in self.running:
            if not work.new:
                work.new.append(next_token(work.ids))
        for work in [work for work in self.running if len(work.new) >= work.num_new]:
            self.running.remove(work)
            self._leave(work, len(work.ids) + len(work.new))
            work.done(work.new)

    def check_empty(self, name: str) -> None:
        """Check that no page is held and the ledger is as it should be.

        Raises:
            FleetLaw: a page or a row is held.
        """
        self._ledger.check()
        free, pages = self._ledger.free_pages(0), self._ledger.groups[0].num_pages
        if free != pages or self._rows or self.num_open:
            raise FleetLaw(
                f"{name} has {pages - free} pages, {len(self._rows)} sessions and {self.num_open} "
                "texts when all clients have gone"
            )

    def _begin(self, work: Work) -> None:
        row = self._rows.get(work.session, 0) if work.session else 0
        work.row = row or self._ledger.admit()
        work.new = []
        plan = self._ledger.prepare_extend([work.row], [len(work.ids)])
        self._ledger.launch(plan.step)
        self._ledger.complete(plan.step)
        if work.session:
            self._rows[work.session] = work.row
        self.running.append(work)

    def _leave(self, work: Work, length: int) -> None:
        """Give the row back, or keep `length` tokens of it for the session's next turn."""
        if work.session is None or work.session not in self._rows or not length:
            self._ledger.finish(work.row)
            if work.session in self._rows:
                self._rows[work.session] = 0
        else:
            num_kept = min(length, int(self._ledger.resolved_len[work.row]))
            self._ledger.end_turn(work.row, num_kept)

    def _open(
        self,
        max_tokens: int | None,
        tokens: Sequence[int] = (),
        image: tuple[int, int] | None = None,
    ) -> int:
        number, self._next = self._next, self._next + 1
        self._rows[number] = 0
        if image is not None:
            with contextlib.suppress(OutOfRows, OutOfPages):  # then the text is here alone
                row = self._ledger.import_row(*image)
                self._ledger.end_turn(row, image[0])
                self._rows[number] = row
        return number

    def _export(self, number: int) -> tuple[int, int] | None:
        """Return the tokens with KV and with draft KV, for the pages; None if there is no KV."""
        row = self._rows[number]
        if not row or not self._ledger.resolved_len[row]:
            return None
        lens = self._ledger.resolved_len, self._ledger.drafted_len
        return int(lens[0][row]), min(int(lens_by_row[row]) for lens_by_row in lens)

    def _rewind(self, number: int, offset: int) -> int:
        row = self._rows[number]
        if not row:
            return 0
        num_kept = min(offset, int(self._ledger.resolved_len[row]))
        return self._ledger.end_turn(row, num_kept)

    def _close(self, number: int) -> None:
        row = self._rows.pop(number)
        for work in [*self.running, *self.waiting]:
            if work.session == number:
                self.abort(work)
                return
        if row:
            self._ledger.finish(row)
