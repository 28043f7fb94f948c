"""`BudgetController`: chooses the shape of each row from the row's results; docs/adaptive.md.

Expected tokens come from `RowAcceptance`, seconds from `RoundCost`, the choice from the core
(`choose_shapes`): each row gets the candidate with the least expected seconds a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from specpool._core import Shape, choose_shapes
from specpool.arrays import Int32, Int64
from specpool.engine.shape_names import width_order
from specpool.engine.shapes.base import CHOICE_ROUNDS, NumCorrectDrafts
from specpool.engine.shapes.config import MOST_BUDGET_SHAPES, AdaptiveConfig
from specpool.engine.shapes.round_cost import RoundCost
from specpool.engine.shapes.row_acceptance import RowAcceptance
from specpool.errors import ConfigError

#: Pages that each candidate needs beyond the row's narrowest, int32 [B, C, G], and the pages that
#: may be used so, int64 [G]; None if all rows may have their widest.
Spare = tuple[Int32, Int64] | None

_KEEP = 1.02  # multiplies the expected tokens of a row's present shape, so that it switches less
_HORIZON = 32.0  # rounds in which a row catches up with its target
# A row is in time if it would be with log odds this many standard deviations above the estimate.
_DOUBT = 1.5
_LEAST_SECONDS, _MOST_SECONDS = 1e-9, 1e6  # of a round; others are not measurements
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
            clock: returns the seconds for the rows' targets.
        """
        self.candidates = tuple(sorted(config.candidates, key=width_order))
        self._clock = clock
        self.missed_ct = 0
        self._start: list[tuple[Shape, int, float]] = []  # shape, rows and seconds of its rounds
        self.attach([*self.candidates], 1)

    def attach(self, shapes: Sequence[Shape], num_rows: int) -> None:
        """Serve rows in `[0, num_rows)`; shape indices are into `shapes`.

        Results are forgotten, but not the rounds of the start.

        Raises:
            ConfigError: there are too many shapes for a choice in each round.
        """
        if len(shapes) > MOST_BUDGET_SHAPES:
            raise ConfigError(
                f"policy 'budget' chooses among at most {MOST_BUDGET_SHAPES} shapes, those of "
                f"requests and of forced spans included, got {len(shapes)}"
            )
        self._acceptance = RowAcceptance(shapes, num_rows)
        self._cost = RoundCost(shapes, self.candidates[0])
        self._latest = np.full(num_rows, -1, np.int32)  # the shape of each row's round before
        self._worth = np.ones(num_rows)
        self._per_token = np.zeros(num_rows)  # the target in tokens per second; 0 for none
        self._started = np.full(num_rows, np.nan)  # when the row had its first round
        self._num_made = np.zeros(num_rows)  # tokens since then
        self._round = 0
        # Rows, shapes and choice of the rounds until the next choice; None means to choose anew.
        self._standing_choice: tuple[Int32, Int32, Int32] | None = None
        # Rows, choice and late rows of a choice that has had no round yet.
        self._open: tuple[Int32, Int32, int] | None = None
        for shape, batch_size, seconds in self._start:
            if shape in shapes:
                self._cost.add_uniform_round(shape, batch_size, seconds)

    def admit(self, row: int, *, tpot_ms: float | None, priority: int) -> None:
        """Begin a row's request, with its target and what its tokens are worth."""
        self._acceptance.reset(row)
        self._standing_choice = None
        self._latest[row] = -1
        self._worth[row] = 2.0 ** min(max(priority, -MOST_PRIORITY), MOST_PRIORITY)
        self._per_token[row] = 0.0 if tpot_ms is None else 1e3 / tpot_ms
        self._started[row], self._num_made[row] = np.nan, 0

    def choose(self, rows: Int32, shapes: Int32, spare: Callable[[], Spare] | None = None) -> Int32:
        """Choose the shape of each row's next round, int32 [B].

        A choice lasts for a few rounds if the rows stay the same, none of them has a target, and
        memory does not bind. Nothing is learned from it, and nothing counted, before `count_round`.

        Args:
            rows: int32 [B].
            shapes: int32 [B, C], the shape that each candidate is for each row.
            spare: returns the pages for width; None if memory does not bind.
        """
        if (standing := self._standing_choice) is not None and self._round % CHOICE_ROUNDS:
            if np.array_equal(standing[0], rows) and np.array_equal(standing[1], shapes):
                self._open = rows, standing[2], 0
                return standing[2]
        due, room = self._due(rows), None if spare is None else spare()
        hoped = self._acceptance.tokens(rows, deviations=_DOUBT) if due.any() else None
        chosen, num_missed = self._choice(rows, shapes, due, hoped, room)
        self._standing_choice = None if room is not None or due.any() else (rows, shapes, chosen)
        self._open = rows, chosen, num_missed
        return chosen

    def narrow(self, shapes: Int32) -> Int32:
        """Take narrower shapes for the rows of the latest choice, int32 [B], and return them."""
        self._standing_choice = None
        if self._open is not None:
            self._open = self._open[0], shapes, self._open[2]
        return shapes

    def _choice(
        self,
        rows: Int32,
        shapes: Int32,
        due: npt.NDArray[np.float64],
        hoped: npt.NDArray[np.float64] | None,
        spare: Spare,
    ) -> tuple[Int32, int]:
        """Return the shapes, int32 [B], and how many rows miss their target.

        `due` are the tokens due, float64 [B, 2]; `hoped` are those by which rows are judged to be
        in time, float64 [B, S].
        """
        tokens, lanes = self._acceptance.tokens(rows), np.arange(len(rows))
        latest = self._latest[rows]
        known = lanes[latest >= 0]
        current_tokens = np.ones(len(rows))
        if len(known):
            current_tokens[known] = tokens[known, latest[known]]
            current_tokens[latest < 0] = current_tokens[known].mean()
        tokens[known, latest[known]] *= _KEEP
        costs = self._cost.costs(len(rows))
        pages, free = (None, None) if spare is None else spare
        picks, _, _, num_missed = choose_shapes(
            shapes,
            tokens,
            worth=self._worth[rows],
            gives=current_tokens,
            due=due,
            hoped=hoped,
            base=costs.base,
            mixed=costs.mixed,
            charge=costs.charge,
            lane=costs.lane,
            pages=pages,
            free=free,
        )
        return shapes[lanes, picks], num_missed

    def _due(self, rows: Int32) -> npt.NDArray[np.float64]:
        """Return the tokens that each row's round has to give, float64 [B, 2]."""
        due = np.zeros((len(rows), 2))
        per_token = self._per_token[rows]
        if per_token.any():
            now = self._clock()
            new = rows[np.isnan(self._started[rows])]
            self._started[new] = now
            behind = (now - self._started[rows]) * per_token - self._num_made[rows]
            due[:, 0] = np.clip(behind / _HORIZON, -1.0, 1.0) * (per_token > 0)
            due[:, 1] = per_token
        return due

    def count_round(self) -> None:
        """Count the latest choice: a round has been prepared with it."""
        if self._open is None:
            return
        rows, shapes, num_missed = self._open
        self._latest[rows] = shapes
        self._round += 1
        self.missed_ct += num_missed
        self._open = None

    def learn(self, rows: Int32, shapes: Int32, accept_len: Int32) -> None:
        """Learn from the results of a round's lanes, int32 [B] each."""
        self._num_made[rows] += accept_len
        self._acceptance.learn(rows, shapes, accept_len)

    def observe(self, shapes: Int32, seconds: float) -> None:
        """Learn from the seconds of a round whose lanes had these shapes, int32 [B].

        Seconds that no round can take (NaN, 0, infinite) teach nothing.
        """
        if _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
            # What is tried out must not make a row late, nor take pages that others need.
            self._cost.observe(shapes, seconds, explores=self._standing_choice is not None)

    def on_round_seconds(self, shape: Shape, batch_size: int, seconds: float) -> None:
        """Learn from a round of the start, whose lanes all had this shape."""
        if _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
            self._start.append((shape, batch_size, seconds))
            self._cost.add_uniform_round(shape, batch_size, seconds)

    def activate_step_by_batch(self, batch_size: int) -> Shape:
        """Return the narrowest candidate: the rows of a round are chosen by `choose`."""
        return self.candidates[0]

    def on_verify_complete(
        self, shape: Shape, batch_size: int, num_correct_drafts: NumCorrectDrafts
    ) -> Shape | None:
        """Do nothing: rows learn by `learn`."""
        return None
