"""`BudgetController`: chooses the shape of each row by what the row gives; docs/budget.md.

Expected tokens come from `RowAcceptance`, seconds from `RoundCost`, the choice from the core
(`choose_shapes`). Only drafts that run are measured, so now and then a round hopes for more than is
known, and a few rounds have one shape to learn what that takes. Both may cost one percent of the
tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from specpool._core import Shape, choose_shapes
from specpool.adaptive.base import CHOICE_ROUNDS, NumCorrectDrafts
from specpool.adaptive.config import MOST_BUDGET_SHAPES, AdaptiveConfig
from specpool.adaptive.round_cost import RoundCost
from specpool.adaptive.row_acceptance import RowAcceptance
from specpool.arrays import Int32, Int64
from specpool.errors import ConfigError
from specpool.shape_names import width_order

#: Pages that each candidate needs beyond the row's narrowest, int32 [B, C, G], and the pages that
#: may be used so, int64 [G]; None = all rows may have their widest.
Spare = tuple[Int32, Int64] | None

_KEEP = 1.02  # a row's shape of the round before counts as so many times its tokens
_HOPE_SHARE = 0.01  # the share of the tokens that hopeful rounds may cost
_MOST_SAVED = 2.0  # the most of that to save up, in rounds
_HOPE_ROUNDS = 8  # from one look for a hopeful round to the next, a multiple of `CHOICE_ROUNDS`
# Rounds of one shape may give so many times the tokens per second that are known, if there was
# none for so many rounds.
_LOOK_HOPE, _LOOK_ROUNDS = 1.2, 64
_MOST_LOOK_ROUNDS = 1024  # the rounds double with each look, up to these
_MOST_OWED = 8.0  # rounds that a look at what the start told may cost more than is saved
_FIRST_HOPE = 2.5  # likewise, of the narrowest shape before its first round: drafts must not lose
_HORIZON = 32.0  # rounds in which a row makes up for what it is behind its target
# A row is in time if it would be so with log odds so many standard deviations above the estimate.
_DOUBT = 1.5
_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e6  # of a round; others are no measurement
MOST_PRIORITY = 8  # steps of priority beyond which a token is worth no more, or no less


class BudgetController:
    """A controller of each row. Equal results, seconds and times give equal choices.

    Attributes:
        candidates: the shapes that it may choose, the narrowest first.
        missed_ct: rows, counted in each round, that were expected to miss their target in it.
    """

    def __init__(
        self,
        config: AdaptiveConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin without measurements.

        Args:
            config: the candidates, in one range.
            clock: tells the seconds for the rows' targets.
        """
        self.candidates = tuple(sorted(config.candidates, key=width_order))
        self._clock = clock
        self.missed_ct = 0
        # Rounds of the start: the lanes of each shape, seconds, and the context of each lane.
        self._told: list[tuple[Mapping[Shape, int], float, float]] = []
        self.attach([*self.candidates], 1)

    def attach(
        self,
        shapes: Sequence[Shape],
        num_rows: int,
        *,
        lens: Int32 | None = None,
    ) -> None:
        """Serve rows in `[0, num_rows)`; shape indices are into `shapes`.

        `lens` is int32 [num_rows or more], the tokens that each row holds, kept up to date by its
        owner; None = they do not count. Results are forgotten, but not the rounds of the start.

        Raises:
            ConfigError: there are more shapes than the choice can tell apart.
        """
        if len(shapes) > MOST_BUDGET_SHAPES:
            raise ConfigError(
                f"policy 'budget' chooses among at most {MOST_BUDGET_SHAPES} shapes, those of "
                f"requests and of forced spans included, got {len(shapes)}"
            )
        self._lens: Int32 = np.zeros(num_rows, np.int32) if lens is None else lens
        self._index = {shape: index for index, shape in enumerate(shapes)}
        self._acceptance = RowAcceptance(shapes, num_rows)
        self._cost = RoundCost(shapes)
        self._start = RoundCost(shapes)  # as the start told, whatever service says
        self._latest = np.full(num_rows, -1, np.int32)  # the shape of each row's round before
        self._worth = np.ones(num_rows)
        self._per_token = np.zeros(num_rows)  # the target in tokens per second; 0 = none
        self._started = np.full(num_rows, np.nan)  # when the row had its first round
        self._num_made = np.zeros(num_rows)  # tokens since then
        self._round, self._saved = 0, _MOST_SAVED
        # The round from which each shape may be looked at, and the rounds to the next look.
        self._look_at: Int64 = np.zeros(len(shapes), np.int64)
        self._look_gap: Int64 = np.full(len(shapes), _LOOK_ROUNDS)
        # Rows, shapes and choice of the rounds until the next choice; None = choose anew.
        self._kept: tuple[Int32, Int32, Int32] | None = None
        self._open: tuple[Int32, Int32, float, int] | None = None  # rows, shapes, loss, missed
        for told in self._told:
            self._tell(*told)

    def admit(self, row: int, *, tpot_ms: float | None, priority: int) -> None:
        """Begin a row's request, with its target and what its tokens are worth."""
        self._acceptance.reset(row)
        self._kept = None
        self._latest[row] = -1
        self._worth[row] = 2.0 ** min(max(priority, -MOST_PRIORITY), MOST_PRIORITY)
        self._per_token[row] = 0.0 if tpot_ms is None else 1e3 / tpot_ms
        self._started[row], self._num_made[row] = np.nan, 0

    def choose(self, rows: Int32, shapes: Int32, spare: Callable[[], Spare] | None = None) -> Int32:
        """Choose the shape of each row's next round, int32 [B].

        A choice lasts for a few rounds if the rows stay the same, none of them has a target, and
        memory does not bind. Nothing is learned from it, and nothing counted, before `ran`.

        Args:
            rows: int32 [B].
            shapes: int32 [B, C], the shape that each candidate is for each row.
            spare: returns the pages for width; None = memory does not bind.
        """
        if (kept := self._kept) is not None and self._round % CHOICE_ROUNDS:
            if np.array_equal(kept[0], rows) and np.array_equal(kept[1], shapes):
                self._open = rows, kept[2], 0.0, 0
                return kept[2]
        context = self._lens[rows].astype(np.float64)
        self._cost.fit(len(rows), float(context.mean()))
        due, room = self._due(rows), None if spare is None else spare()
        tokens, hoped = self._acceptance.tokens(rows), None
        if due.any():
            hoped = self._acceptance.tokens(rows, deviations=_DOUBT)
        targets = due, hoped
        chosen, seconds, missed = self._choice(rows, shapes, tokens.copy(), context, targets, room)
        self._kept = None if room is not None or due.any() else (rows, shapes, chosen)
        loss = 0.0
        if self._round % _HOPE_ROUNDS == 0 and self._saved > 0:
            lanes = np.arange(len(rows))
            rate = float(tokens[lanes, chosen].sum()) / seconds
            look = None
            if self._kept is not None:
                look = self._look(shapes, tokens, context, chosen, rate, seconds)
            if look is not None:
                chosen, loss = look
                self._kept = rows, shapes, chosen
                self._cost.doubt(*self._composition(chosen, context))
                gap = self._look_gap[chosen[0]]
                self._look_gap[chosen[0]] = min(2 * gap, _MOST_LOOK_ROUNDS)
            else:
                hopes = self._acceptance.tokens(rows, hopes=True)
                if hoped is not None:
                    targets = due, np.maximum(hoped, hopes)
                hopeful, longer, _ = self._choice(rows, shapes, hopes, context, targets, room)
                # In rounds as they would be.
                lost = (longer - float(tokens[lanes, hopeful].sum()) / rate) / seconds
                if (hopeful != chosen).any() and lost <= self._saved:
                    chosen, loss, self._kept = hopeful, lost, None
        self._open = rows, chosen, loss, missed
        return chosen

    def _look(
        self,
        shapes: Int32,
        tokens: npt.NDArray[np.float64],
        context: npt.NDArray[np.float64],
        chosen: Int32,
        rate: float,
        seconds: float,
    ) -> tuple[Int32, float] | None:
        """Return a candidate for all rows whose rounds may take less than is known, and the loss.

        Arguments are as in `_choice`, then the choice, its tokens per second and its seconds. None
        = no candidate is worth a look, or each has run lately. The loss is in rounds.
        """
        may_look = (shapes == shapes[0]).all(axis=0) & (self._look_at[shapes[0]] <= self._round)
        if not may_look.any():
            return None
        found, best = None, 1.0
        self._start.fit(len(shapes), float(context.mean()))
        rate_at_start = rate * seconds / self._start.of(*self._composition(chosen, context))
        for column in may_look.nonzero()[0].tolist():
            alike = shapes[:, column]
            shape = int(alike[0])
            is_first = not column and not self._look_at[shape]
            counts, held = self._composition(alike, context)
            longer = self._cost.of(counts, held)
            made = float(tokens[:, shape].sum())
            loss = CHOICE_ROUNDS * (longer - made / rate) / seconds
            hope = (_FIRST_HOPE if is_first else _LOOK_HOPE) * made / longer / rate
            # What service has learned may be over: a shape that was slow for a while, say.
            again = made / self._start.of(counts, held) / rate_at_start
            may_owe = again > 1.0 and loss <= _MOST_OWED
            hope = max(hope, again) if may_owe else hope
            if hope > best and (is_first or may_owe or loss <= self._saved):
                found, best = (alike.copy(), max(loss, 0.0)), hope
        return found

    def _composition(
        self, shapes: Int32, context: npt.NDArray[np.float64] | Int32
    ) -> tuple[Int64, npt.NDArray[np.float64]]:
        """Return the lanes of each shape, int64 [S], and the tokens that they hold, float64 [S]."""
        size = len(self._index)
        counts: Int64 = np.bincount(shapes, minlength=size).astype(np.int64, copy=False)
        held = np.bincount(shapes, context, minlength=size).astype(np.float64, copy=False)
        return counts, held

    def narrow(self, shapes: Int32) -> Int32:
        """Take narrower shapes for the rows of the latest choice, int32 [B], and return them."""
        self._kept = None
        if self._open is not None:
            self._open = self._open[0], shapes, 0.0, self._open[3]
        return shapes

    def _choice(
        self,
        rows: Int32,
        shapes: Int32,
        tokens: npt.NDArray[np.float64],
        context: npt.NDArray[np.float64],
        targets: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64] | None],
        spare: Spare,
    ) -> tuple[Int32, float, int]:
        """Return shapes [B], seconds, and rows that miss their target.

        `tokens` are those expected of each row and shape, float64 [B, S]; they are changed.
        `context` are the tokens that each row holds, float64 [B]. `targets` are the tokens due, and
        those by which rows are judged to be in time, float64 [B, 2] and [B, S].
        """
        cost, lanes = self._cost, np.arange(len(rows))
        latest = self._latest[rows]
        kept = lanes[latest >= 0]
        gives = np.ones(len(rows))
        if len(kept):
            gives[kept] = tokens[kept, latest[kept]]
            gives[latest < 0] = gives[kept].mean()
        tokens[kept, latest[kept]] *= _KEEP
        pages, free = (None, None) if spare is None else spare
        picks, _, _, seconds, missed = choose_shapes(
            shapes,
            tokens,
            worth=self._worth[rows],
            gives=gives,
            due=targets[0],
            hoped=targets[1],
            base=cost.base(len(rows)),
            ridge=cost.ridge,
            ridge_per_token=cost.ridge_per_token,
            slope=cost.slope,
            charge=cost.charge,
            lane=cost.lane,
            nodes=cost.nodes,
            context=context,
            per_token=cost.per_token,
            pages=pages,
            free=free,
        )
        return shapes[lanes, picks], seconds, missed

    def _due(self, rows: Int32) -> npt.NDArray[np.float64]:
        """Return the tokens that each row's round has to give, float64 [B, 2]."""
        due = np.zeros((len(rows), 2))
        wanted = self._per_token[rows]
        if wanted.any():
            now = self._clock()
            mine = rows[np.isnan(self._started[rows])]
            self._started[mine] = now
            behind = (now - self._started[rows]) * wanted - self._num_made[rows]
            due[:, 0] = np.clip(behind / _HORIZON, -1.0, 1.0) * (wanted > 0)
            due[:, 1] = wanted * self._cost.load
        return due

    def ran(self) -> None:
        """Count the latest choice: a round has been prepared with it."""
        if self._open is None:
            return
        rows, shapes, loss, missed = self._open
        self._latest[rows] = shapes
        self._saved = min(self._saved + _HOPE_SHARE - loss, _MOST_SAVED)
        if (shapes == shapes[0]).all():
            self._look_at[shapes[0]] = self._round + self._look_gap[shapes[0]]
        self._round += 1
        self.missed_ct += missed
        self._open = None

    def learn(self, rows: Int32, shapes: Int32, accept_len: Int32) -> None:
        """Learn from the results of a round's lanes, int32 [B] each."""
        self._num_made[rows] += accept_len
        self._acceptance.learn(rows, shapes, accept_len)

    def observe(self, shapes: Int32, seconds: float, lens: Int32 | None = None) -> None:
        """Learn from the seconds of a round whose lanes had these shapes, int32 [B].

        `lens` are the tokens that the lanes held, int32 [B]; None = 0. Seconds that no round
        can take (NaN, 0, infinite) teach nothing.
        """
        if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
            return
        counts, context = self._composition(shapes, np.zeros(len(shapes)) if lens is None else lens)
        self._cost.observe(counts, seconds, context)

    def on_round_seconds(self, shape: Shape, batch_size: int, seconds: float) -> None:
        """Learn from a round of the start, whose lanes all had this shape."""
        self.on_mixed_seconds({shape: batch_size}, seconds)

    def on_mixed_seconds(
        self, counts: Mapping[Shape, int], seconds: float, context: float = 0.0
    ) -> None:
        """Learn from a round of the start, by the lanes of each shape and the tokens of each."""
        if _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
            self._told.append((counts, seconds, context))
            self._tell(counts, seconds, context)

    def _tell(self, counts: Mapping[Shape, int], seconds: float, context: float) -> None:
        lanes = np.zeros(len(self._index), np.int64)
        for shape, num_lanes in counts.items():
            if (index := self._index.get(shape)) is None:
                return
            lanes[index] = num_lanes
        held = np.multiply(lanes, context, dtype=np.float64)
        for cost in (self._cost, self._start):
            cost.tell(lanes, seconds, held)

    def activate_step_by_batch(self, batch_size: int) -> Shape:
        """Return the narrowest candidate: the rows of a round are chosen by `choose`."""
        return self.candidates[0]

    def on_verify_complete(
        self, shape: Shape, batch_size: int, num_correct_drafts: NumCorrectDrafts
    ) -> Shape | None:
        """Do nothing: rows learn by `learn`."""
        return None
