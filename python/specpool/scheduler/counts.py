"""`Counts`: the counters of a scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from specpool._core import Shape
from specpool.arrays import Int32
from specpool.scheduler.requests.latency import Latency, Times

# The most steps whose arrays are kept before they are added up.
_MOST_WAITING = 256


class Counts:
    """The counters of a scheduler. Steps leave their arrays, which are added up when read."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        """Start at 0; rounds have one of these shapes."""
        max_accept_len = max(shape.max_accept_len for shape in shapes)
        # The drafts of a round of each shape, int32 [num_shapes].
        self._num_drafts = np.array([shape.num_draft_tokens - 1 for shape in shapes], np.int32)
        self.round_ct = self.prefill_ct = 0
        self.drafted_round_ct = self.draft_ct = 0  # rows' rounds with drafts, and their drafts
        self.forced_token_ct = 0  # accepted drafts that the form of a text left no choice about
        self.end_cts: Counter[str] = Counter()  # requests by finish reason
        self.latency = Latency()
        self._accept_cts = np.zeros(max_accept_len + 1, np.int64)  # rows' rounds by accept length
        self._prefilled_token_ct = self._first_token_ct = 0
        self._rounds: list[Int32] = []  # not added up yet, like `_prefills`
        self._prefills: list[tuple[Int32, Int32, Int32]] = []

    def round(self, accept_len: Int32, shapes: Int32) -> list[int]:
        """Count a decode step with these accept lengths and shapes, int32 [B] each.

        Returns:
            The number of drafts of each lane.
        """
        num_drafts = self._num_drafts[shapes]
        self.round_ct += 1
        self.drafted_round_ct += int(np.count_nonzero(num_drafts))
        self.draft_ct += int(num_drafts.sum())
        self._rounds.append(accept_len)
        if len(self._rounds) > _MOST_WAITING:
            self._add_up()
        drafts: list[int] = num_drafts.tolist()
        return drafts

    def forced(self, num_drafts: int, num_correct: int) -> None:
        """Count a row's round whose first drafts a form had forced."""
        self.forced_token_ct += min(num_drafts, num_correct)

    def prefill(self, start: Int32, new_len: Int32, drawn: Int32) -> None:
        """Count a prefill step: first position, end and drawn tokens of each lane, int32 [B]."""
        self.prefill_ct += 1
        self._prefills.append((start, new_len, drawn))
        if len(self._prefills) > _MOST_WAITING:
            self._add_up()

    def end(self, reason: str, times: Times | None = None) -> None:
        """Count the end of a request, and its latency if `times` are given."""
        if times is not None and reason in ("stop", "length"):
            self.latency.add(times)
        self.end_cts[reason] += 1

    @property
    def accept_cts(self) -> list[int]:
        """Rounds of single rows by accept length, from 0."""
        self._add_up()
        cts: list[int] = self._accept_cts.tolist()
        return cts

    @property
    def prefilled_token_ct(self) -> int:
        """The tokens of prefill steps."""
        self._add_up()
        return self._prefilled_token_ct

    @property
    def generated_token_ct(self) -> int:
        """The tokens that the steps generated."""
        accepted = sum(length * ct for length, ct in enumerate(self.accept_cts))
        return self._first_token_ct + accepted

    def _add_up(self) -> None:
        rounds, self._rounds = self._rounds, []
        if rounds:
            lens = np.concatenate(rounds)
            self._accept_cts += np.bincount(lens, minlength=len(self._accept_cts))
        prefills, self._prefills = self._prefills, []
        for start, new_len, drawn in prefills:
            self._prefilled_token_ct += int((new_len - start).sum())
            self._first_token_ct += int(drawn.sum())
