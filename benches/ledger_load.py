"""The load of `bench ledger`: a batch whose requests come, grow and end, on either side.

`step` is timed: all calls that an engine makes for one decode step. `refill` is not timed: it
replaces the requests that have reached their end, so that pages are taken and given back now and
then, and rows are no longer in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from benches.plain_ledger import PlainLedger, Req
from specpool import _core
from specpool._core import Group, Ledger, Shape
from specpool.capacity.group_sizes import Placement

Ints = NDArray[np.int32]

# Tokens of a prompt, at least and at most, and of a request at its end.
PROMPT = (64, 1024)
END = 2048
# Rounds whose accept lengths are drawn ahead.
NUM_OUTCOMES = 64


@dataclass(frozen=True, slots=True)
class Setting:
    """Pages and drafts of a benchmark."""

    name: str
    page_size: int
    shape: Shape
    overlap_depth: int = 0
    placement: Placement = "shared"
    layout: Literal["dense", "holey"] = "dense"

    @property
    def reserve(self) -> int:
        """Slots that SGLang reserves beyond the committed length."""
        return 2 * _core.sizing_alloc_len_per_decode(
            page_size=self.page_size,
            num_steps=self.shape.num_steps,
            topk=self.shape.topk,
            num_draft_tokens=self.shape.num_draft_tokens,
            layout=self.layout,
        )

    @property
    def pages_per_row(self) -> int:
        """Pages of a row at its end, enough for both sides."""
        return (END + self.shape.max_accept_len + self.reserve) // self.page_size + 1

    def ledger(self, batch: int, num_pages: int | None = None, **options: Any) -> Ledger:
        """A ledger with rows and pages for the batch and for the fenced pages behind it."""
        num_pages = num_pages or 2 * batch * self.pages_per_row
        target = Group("target", page_size=self.page_size, num_pages=num_pages)
        draft = Group(
            "draft",
            page_size=self.page_size,
            num_pages=num_pages,
            hosts_drafts=True,
            layout=self.layout,
        )
        options = {"num_rows": 2 * batch, "max_context_len": END + 16} | options
        groups = [target, draft] if self.placement == "split" else [draft]
        return Ledger(groups, [self.shape], overlap_depth=self.overlap_depth, **options)


class Load(Protocol):
    """A batch that decodes."""

    def step(self) -> None:
        """One decode step of the batch."""

    def refill(self) -> None:
        """Replace the requests that have reached their end."""


class LedgerLoad:
    """A batch on our ledger."""

    def __init__(self, setting: Setting, batch: int, ledger: Ledger, seed: int = 0) -> None:
        self.ledger = ledger
        self._rng = np.random.default_rng(seed)
        self._outcomes = _outcomes(setting, batch, self._rng)
        self._launched: list[int] = []
        self._depth = setting.overlap_depth
        self.rows = np.zeros(batch, np.int32)
        self.shapes = np.ones(batch, np.int32)
        self._admit(np.arange(batch))
        self._rng.shuffle(self.rows)
        for _ in range(self._depth):
            self._launched.append(self._launch())

    def _admit(self, lanes: NDArray[np.intp]) -> None:
        for lane in lanes:
            self.rows[lane] = self.ledger.admit()
        for part in np.array_split(lanes, -(-len(lanes) // self.ledger.max_batch)):
            lens = self._rng.integers(*PROMPT, len(part), dtype=np.int32)
            plan = self.ledger.prepare_extend(self.rows[part], lens)
            self.ledger.launch(plan.step)
            self.ledger.take_delta(plan.step)
            self.ledger.ack_delta(plan.step)

    def _launch(self) -> int:
        plan = self.ledger.prepare_decode(self.rows, self.shapes)
        self.ledger.launch(plan.step)
        return plan.step

    def step(self) -> None:
        """One decode step; with overlap the round resolved is the one before."""
        ledger, rows, shapes, launched = self.ledger, self.rows, self.shapes, self._launched
        accept_lens = next(self._outcomes)
        ledger.tokens_required(rows, shapes)
        plan = ledger.prepare_decode(rows, shapes)
        step = plan.step
        ledger.launch(step)
        ledger.take_delta(step)
        ledger.ack_delta(step)
        launched.append(step)
        oldest = launched.pop(0)
        ledger.resolve(oldest, accept_lens)
        ledger.complete(oldest)

    def refill(self) -> None:
        """Finish the rows at their end and admit others in their place."""
        (lanes,) = np.nonzero(self.ledger.resolved_len[self.rows] >= END)
        if len(lanes):
            for row in self.rows[lanes].tolist():
                self.ledger.finish(row)
            self._admit(lanes)

    def drain(self) -> None:
        """End everything, and check that nothing is held afterwards."""
        last = self._launch()
        for row in self.rows.tolist():
            self.ledger.finish(row)
        for step in [*self._launched, last]:
            self.ledger.resolve(step, next(self._outcomes))
        self.ledger.complete(last)


class PlainLoad:
    """The same batch in plain Python."""

    def __init__(self, setting: Setting, batch: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._outcomes = _outcomes(setting, batch, self._rng)
        self.plain = PlainLedger(
            page_size=setting.page_size,
            num_pages=batch * setting.pages_per_row,
            num_rows=batch,
            pages_per_row=setting.pages_per_row,
            reserve=setting.reserve,
        )
        self.reqs = self._admit(batch)
        self._rng.shuffle(self.reqs)

    def _admit(self, count: int) -> list[Req]:
        reqs = [self.plain.admit() for _ in range(count)]
        self.plain.prepare_for_extend(reqs, self._rng.integers(*PROMPT, count).tolist())
        return reqs

    def step(self) -> None:
        """One decode step."""
        plain, reqs = self.plain, self.reqs
        accept_lens = next(self._outcomes)
        plain.new_tokens_required_next_decode(reqs)
        plain.prepare_for_decode(reqs)
        plain.resolve(reqs, accept_lens)

    def refill(self) -> None:
        """Release the requests at their end and admit others in their place."""
        lanes = [lane for lane, req in enumerate(self.reqs) if req.kv_committed_len >= END]
        for lane in lanes:
            self.plain.release(self.reqs[lane])
        for lane, req in zip(lanes, self._admit(len(lanes)), strict=True):
            self.reqs[lane] = req


def _outcomes(setting: Setting, batch: int, rng: np.random.Generator) -> Iterator[Ints]:
    """Accept lengths [batch], round after round: every one that the shape allows equally often."""
    max_accept_len = setting.shape.max_accept_len
    rounds = rng.integers(1, max_accept_len, (NUM_OUTCOMES, batch), dtype=np.int32, endpoint=True)
    return itertools.cycle(list(rounds))
