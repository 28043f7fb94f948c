"""`RoundShapes`: chooses the shape of each row's next round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from specpool._core import Shape
from specpool.arrays import Int32, Int64
from specpool.checks import shown
from specpool.engine.shape_names import width_order
from specpool.engine.shapes.budget import BudgetController, Spare
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from specpool.engine.scheduler.request import Request
    from specpool.engine.shapes import Controller


# Rows are sorted into lanes by shape, then by admission number, which has this many bits.
_ORDER_BITS = 48


@dataclass(frozen=True, slots=True)
class Choice:
    """A controller's choice for a round."""

    shape: Shape  # of a budget: the one that most rows have
    batch_size: int  # rows that decode


class RoundShapes:
    """The shapes of the rows' rounds: each row's own, or the controller's choice within its limit.

    Attributes:
        controller: chooses the shape of each round; None if there is none.
        budget: the controller, if it chooses a shape for each row; else None.
        choice: the choice for the latest round, or for the next one that was tried; None if
            there is none.
        switch_ct: rounds whose choice differed from that of the round before.
        round_cts: rounds by the chosen shape.
        all_choices: sets of shapes that a request may use: the possible values of
            `Request.choices`, without a limit of steps, then with each limit that matters; and if
            there is a shape for forced spans, every shape and each of these sets together with it.
        page_choices: for each of them, the shapes that a row must always have pages for: all, or
            with a budget the narrowest, and the shape for forced spans.
        forced: the index of the shape for forced spans; 0 if there is none.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        num_rows: int,
        controller: Controller | None,
        forced_shape: Shape | None = None,
    ) -> None:
        """Start without requests. Shape indices are into `shapes`, the ledger's.

        `forced_shape` is the chain for forced spans, one of `shapes`; None if there is none.

        Raises:
            ConfigError: a candidate of the controller is not among `shapes`.
        """
        self.controller = controller
        self.budget = controller if isinstance(controller, BudgetController) else None
        self._steps = [shape.num_steps for shape in shapes]
        self._index = {shape: index for index, shape in enumerate(shapes)}
        choices = () if controller is None else controller.candidates
        for shape in choices:
            if shape not in self._index:
                raise ConfigError(
                    f"the controller's candidate {shape} is none of the ledger's shapes "
                    f"{', '.join(map(str, shapes))}"
                )
        self._lines = {shape: line for line, shape in enumerate(choices)}
        caps = [None, *sorted({shape.num_steps for shape in choices})] if choices else []
        self.all_choices = [*dict.fromkeys(self._choices(cap) for cap in caps)]
        self.forced = 0 if forced_shape is None else self._index[forced_shape]
        self._first_with_forced = len(shapes) + len(self.all_choices)
        if self.forced:
            alone = [(index,) for index in range(len(shapes))]
            self.all_choices += [(*choice, self.forced) for choice in [*alone, *self.all_choices]]
        self._shapes = [*shapes]
        self.page_choices = [*map(self._always, self.all_choices)]
        if self.budget is not None:
            self.budget.attach(shapes, num_rows)
        # By candidate and row. Without a controller there is one line.
        size = max(len(choices), 1), num_rows
        self._following: Int32 = np.zeros(size, np.int32)
        self._order: Int64 = np.zeros(size, np.int64)
        self._admission: Int64 = np.zeros(num_rows, np.int64)
        self._chosen: Int32 = np.zeros(num_rows, np.int32)  # by the budget
        self._places: Int64 = np.zeros(num_rows, np.int64)  # likewise, `_order` of `_chosen`
        self.choice: Choice | None = None
        self._is_open = False  # the choice has had no round yet
        self._latest_shape: Shape | None = None  # the choice of the latest round
        self.switch_ct = 0
        self.round_cts: Counter[Shape] = Counter()

    def allowed(
        self, default: Shape, max_steps: int | None
    ) -> tuple[Shape, int, tuple[int, ...] | None]:
        """Return the shapes of a request that names none and drafts at most `max_steps` steps.

        Returns:
            Its largest shape, its `Request.shape_index`, and its `Request.choices`.
        """
        shapes = [*self._index]
        if not self._lines:
            shape = _capped(default, shapes, max_steps)
            return shape, self._index[shape], None
        choices = self._choices(max_steps)
        largest_shape = max(
            (shapes[index] for index in choices), key=lambda shape: shape.num_draft_tokens
        )
        if len({*choices}) == 1:
            return largest_shape, choices[0], None
        return largest_shape, len(shapes) + self.all_choices.index(choices), choices

    def with_forced(
        self, index: int, choices: tuple[int, ...] | None, max_steps: int | None
    ) -> tuple[int, tuple[int, ...] | None, int]:
        """Return `shape_index`, `choices` and `forced_shape` of a request with a form.

        Args:
            index: its `shape_index` without the shape for forced spans.
            choices: likewise.
            max_steps: the most steps that it drafts; None means any number.
        """
        if not self.forced or (max_steps is not None and self._steps[self.forced] > max_steps):
            return index, choices, 0
        choices = choices or (index,) * len(self._following)
        return self._first_with_forced + index, choices, self.forced

    def _choices(self, max_steps: int | None) -> tuple[int, ...]:
        """Return the shape index for each candidate of the controller, within `max_steps`."""
        candidates = [*self._lines]
        capped = [_capped(shape, candidates, max_steps) for shape in candidates]
        if self.budget is not None:
            capped.sort(key=width_order)
        return tuple(self._index[shape] for shape in capped)

    def _always(self, choices: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shapes of a set that a row must always have pages for."""
        if self.budget is None:
            return choices
        forced = choices[-1:] if self.forced and choices[-1] == self.forced else ()
        return (choices[0], *forced)  # of a budget's sets, the first is the narrowest

    def admit(self, row: int, request: Request, admission: int) -> None:
        """Set the shapes of a row that got a request, and its number of admission."""
        self._admission[row] = admission
        self.put(row, request.choices or request.shape_index)
        if self.budget is not None:
            tpot_ms = request.params.tpot_ms
            self.budget.admit(row, tpot_ms=tpot_ms, priority=request.priority)

    def put(self, row: int, shapes: int | tuple[int, ...]) -> None:
        """Set the row's shape, or its shape for each of the controller's candidates; 0 for none."""
        self._following[:, row] = shapes
        order = self._following[:, row].astype(np.int64) << _ORDER_BITS
        self._order[:, row] = order | self._admission[row]

    def look_ahead(self, request: Request, drafts: bool) -> None:
        """Set the shape of a running request's next round: of a forced span, its own, or none.

        Args:
            request: has a row, and tokens that were just added.
            drafts: whether the drafter's guess is worth a round.
        """
        own_shapes = request.choices or request.shape_index
        shape = own_shapes if drafts else 0
        if request.matcher is not None and request.finish_reason is None:
            own_steps = request.shape.max_accept_len - 1  # a tree may have fewer nodes than steps
            max_forced = max(own_steps, self._steps[request.forced_shape])
            request.matcher.follow(request.tokens, request.prompt_len)
            request.forced = request.matcher.forced(max_forced)
            num_forced = len(request.forced)
            if num_forced < min(2, max_forced):  # the drafter's guess may reach further
                request.forced = []
            elif num_forced > own_steps:
                shape = request.forced_shape
            else:
                shape = own_shapes
        self.put(request.row, shape)

    def choose(
        self, limits: Int32, spare: Callable[[Int64, Int32], Spare] | None = None
    ) -> tuple[Int32, Int64]:
        """Choose the shape of each row's next round, and its place among the lanes.

        Args:
            limits: int32 [num_rows], not 0 if a row decodes.
            spare: returns the pages by which these rows, int64 [B], may be wider than their
                narrowest of these shapes, int32 [B, C]; for a budget. None if memory does not bind.

        Returns:
            The shapes, int32 [num_rows], and the sort keys of the lanes, int64 [num_rows]: lanes of
            one shape are neighbours, in the order of admission.

        Raises:
            ConfigError: the controller chose a shape that is not among its candidates.
        """
        batch_size = 0 if self.controller is None else int(np.count_nonzero(limits))
        if self.controller is None or not batch_size:
            return self._following[0], self._order[0]
        if self.budget is not None:
            return self._choose_rows(self.budget, limits, spare)
        if self.choice is None or not self._is_open:
            shape = self.controller.activate_step_by_batch(batch_size)
        else:  # a choice lasts until a round has run with it
            shape = self.choice.shape
        try:
            line = self._lines[shape]
        except (KeyError, TypeError):  # an object that cannot be a key is not a shape
            raise ConfigError(
                f"for a batch of {batch_size} the controller chose {shown(shape)}, which is "
                f"none of its candidates {', '.join(map(str, self._lines))}"
            ) from None
        self.choice, self._is_open = Choice(shape, batch_size), True
        return self._following[line], self._order[line]

    def _choose_rows(
        self,
        budget: BudgetController,
        limits: Int32,
        spare: Callable[[Int64, Int32], Spare] | None,
    ) -> tuple[Int32, Int64]:
        """Let the budget choose; see `choose`."""
        (rows,) = limits.nonzero()
        shapes = np.ascontiguousarray(self._following[:, rows].T)
        room = None if spare is None else partial(spare, rows, shapes)
        return self._set_choice(rows, budget.choose(rows.astype(np.int32), shapes, room))

    def narrow(self, limits: Int32) -> tuple[Int32, Int64] | None:
        """Give each row the narrowest of its shapes for the round that found no pages.

        Returns:
            As `choose`; None if there is no budget, or no row was wider.
        """
        if self.budget is None:
            return None
        (rows,) = limits.nonzero()
        narrowest = self._following[0, rows]
        if not len(rows) or (self._chosen[rows] == narrowest).all():
            return None
        return self._set_choice(rows, self.budget.narrow(narrowest))

    def _set_choice(self, rows: Int64, shapes: Int32) -> tuple[Int32, Int64]:
        """Take these shapes for the rows' next round; return as `choose`."""
        self._chosen[rows] = shapes
        self._places[rows] = shapes.astype(np.int64) << _ORDER_BITS | self._admission[rows]
        commonest = int(np.bincount(shapes).argmax())
        self.choice = Choice(self._shapes[commonest], len(rows))
        return self._chosen, self._places

    def run(self) -> Choice | None:
        """Count a round that was prepared with the choice, and return the choice."""
        if self.budget is not None:
            self.budget.count_round()
        if self.choice is not None:
            shape = self.choice.shape
            self.switch_ct += self._latest_shape not in (None, shape)
            self._latest_shape, self._is_open = shape, False
        return self.choice

    def latest(self, rows: Sequence[int]) -> Int32:
        """Return the shapes of these rows by the latest choice, int32 [B]."""
        if self.budget is not None and self.choice is not None:
            chosen: Int32 = self._chosen[rows]
            return chosen
        line = 0 if self.choice is None else self._lines[self.choice.shape]
        following: Int32 = self._following[line, rows]
        return following

    def learn(
        self,
        choice: Choice | None,
        shapes: Int32,
        accept_len: Int32,
        requests: Sequence[Request] = (),
    ) -> None:
        """Pass a round's results to the controller: each lane's shape, accept length and request.

        Lanes whose drafts were forced do not count: they say nothing about the drafter. `requests`
        is empty if there are none.
        """
        if choice is None:
            return
        assert self.controller is not None
        self.round_cts[choice.shape] += 1
        if self.budget is not None:
            lanes = [lane for lane, request in enumerate(requests) if not request.forced]
            rows = np.array([requests[lane].row for lane in lanes], np.int32)
            self.budget.learn(rows, shapes[lanes], accept_len[lanes])
            return
        chosen = shapes == self._index[choice.shape]
        if any(request.forced for request in requests):
            chosen &= np.array([not request.forced for request in requests], np.bool_)
        if chosen.any():
            num_correct_drafts = accept_len[chosen] - 1
            self.controller.on_verify_complete(choice.shape, choice.batch_size, num_correct_drafts)

    def observe(self, choice: Choice, shapes: Int32, seconds: float) -> None:
        """Pass to the controller the seconds of a turn that was this round alone.

        Without a budget, rounds with lanes of other shapes do not count.
        """
        assert self.controller is not None
        if self.budget is not None:
            self.budget.observe(shapes, seconds)
        elif (shapes == self._index[choice.shape]).all():
            self.controller.on_round_seconds(choice.shape, len(shapes), seconds)

    def stats(self) -> AdaptiveStats | None:
        """Return the choices so far; None without a controller."""
        if self.controller is None:
            return None
        shape = None if self.choice is None else self.choice.shape
        missed_ct = 0 if self.budget is None else self.budget.missed_ct
        return AdaptiveStats(shape, self.switch_ct, dict(self.round_cts), missed_ct)


def _capped(shape: Shape, shapes: Sequence[Shape], max_steps: int | None) -> Shape:
    """Return the shape, or the greatest of `shapes` with at most `max_steps` steps."""
    if max_steps is None or shape.num_steps <= max_steps:
        return shape
    return max(
        (other for other in shapes if other.num_steps <= max_steps),
        key=lambda other: (other.num_steps, other.num_draft_tokens),
        default=Shape.none(),
    )


@dataclass(frozen=True, slots=True)
class AdaptiveStats:
    """The choices of a controller.

    Attributes:
        shape: the choice for the latest round; None if there was none.
        switch_ct: rounds whose choice differed from that of the round before.
        round_cts: rounds by the chosen shape; with a budget, by the shape that most rows had.
        missed_ct: with a budget, rows, counted in each round, that were expected to miss their
            `tpot_ms` in it.
    """

    shape: Shape | None
    switch_ct: int
    round_cts: dict[Shape, int]
    missed_ct: int = 0
