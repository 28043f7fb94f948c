"""`RoundShapes`: chooses the shape of each row's next round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specpool._core import Shape
from specpool.arrays import Int32, Int64
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from specpool.adaptive import Controller
    from specpool.scheduler.requests.request import Request


# Rows are sorted into lanes by shape, then by admission number, which has this many bits.
_ORDER_BITS = 48


@dataclass(frozen=True, slots=True)
class Choice:
    """A controller's choice for a round."""

    shape: Shape
    batch_size: int  # rows that decode


class RoundShapes:
    """The shapes of the rows' rounds: each row's own, or the controller's choice within its limit.

    Attributes:
        controller: chooses the shape of each round; None = there is none.
        choice: the choice for the latest round, or for the next one that was tried; None = none.
        switch_ct: rounds whose choice differed from that of the round before.
        round_cts: rounds by the chosen shape.
        all_choices: sets of shapes that a request may use: the possible values of
            `Request.choices`, without a limit of steps, then with each limit that matters; and if
            there is a shape for forced spans, every shape and each of these sets together with it.
        forced: the index of the shape for forced spans; 0 = there is none.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        num_rows: int,
        controller: Controller | None,
        forced_shape: Shape | None = None,
    ) -> None:
        """Start without requests. Shape indices are into `shapes`, the ledger's.

        `forced_shape` is the chain for forced spans, one of `shapes`; None = there is none.

        Raises:
            ConfigError: a candidate of the controller is not among `shapes`.
        """
        self.controller = controller
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
            self.all_choices += [(*each, self.forced) for each in [*alone, *self.all_choices]]
        # By candidate and row. Without a controller there is one line.
        size = max(len(choices), 1), num_rows
        self._following: Int32 = np.zeros(size, np.int32)
        self._order: Int64 = np.zeros(size, np.int64)
        self._admission: Int64 = np.zeros(num_rows, np.int64)
        self.choice: Choice | None = None
        self._is_open = False  # the choice has had no round yet
        self._ran: Shape | None = None  # the choice of the latest round
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
        most = max((shapes[index] for index in choices), key=lambda shape: shape.num_draft_tokens)
        if len({*choices}) == 1:
            return most, choices[0], None
        return most, len(shapes) + self.all_choices.index(choices), choices

    def with_forced(
        self, index: int, choices: tuple[int, ...] | None, max_steps: int | None
    ) -> tuple[int, tuple[int, ...] | None, int]:
        """Return `shape_index`, `choices` and `forced_shape` of a request with a form.

        Args:
            index: its `shape_index` without the shape for forced spans.
            choices: likewise.
            max_steps: the most steps that it drafts; None = any number.
        """
        if not self.forced or (max_steps is not None and self._steps[self.forced] > max_steps):
            return index, choices, 0
        choices = choices or (index,) * len(self._following)
        return self._first_with_forced + index, choices, self.forced

    def _choices(self, max_steps: int | None) -> tuple[int, ...]:
        """Return the shape index for each candidate of the controller, within `max_steps`."""
        candidates = [*self._lines]
        return tuple(self._index[_capped(shape, candidates, max_steps)] for shape in candidates)

    def admit(self, row: int, shapes: int | tuple[int, ...], admission: int) -> None:
        """Set the shapes of a row that got a request (see `put`), and its number of admission."""
        self._admission[row] = admission
        self.put(row, shapes)

    def put(self, row: int, shapes: int | tuple[int, ...]) -> None:
        """Set the row's shape, or its shape for each of the controller's candidates; 0 = none."""
        self._following[:, row] = shapes
        place = self._following[:, row].astype(np.int64) << _ORDER_BITS
        self._order[:, row] = place | self._admission[row]

    def look_ahead(self, request: Request, drafts: bool) -> None:
        """Set the shape of a running request's next round: of a forced span, its own, or none.

        Args:
            request: has a row, and tokens that were just added.
            drafts: whether the drafter's guess is worth a round.
        """
        own = request.choices or request.shape_index
        shape = own if drafts else 0
        if request.matcher is not None and request.finish_reason is None:
            own_steps = request.shape.num_steps
            most = max(own_steps, self._steps[request.forced_shape])
            request.matcher.follow(request.tokens, request.prompt_len)
            request.forced = request.matcher.forced(most)
            num_forced = len(request.forced)
            if num_forced < min(2, most):  # the drafter's guess may reach further
                request.forced = []
            elif num_forced > own_steps:
                shape = request.forced_shape
            else:
                shape = own
        self.put(request.row, shape)

    def choose(self, limits: Int32) -> tuple[Int32, Int64]:
        """Choose the shape of each row's next round, and its place among the lanes.

        Args:
            limits: int32 [num_rows], not 0 if a row decodes.

        Returns:
            The shapes, int32 [num_rows], and the sort keys of the lanes, int64 [num_rows]: lanes of
            one shape are neighbours, in the order of admission.

        Raises:
            ConfigError: the controller chose a shape that is not among its candidates.
        """
        batch_size = 0 if self.controller is None else int(np.count_nonzero(limits))
        if self.controller is None or not batch_size:
            return self._following[0], self._order[0]
        if self.choice is None or not self._is_open:
            shape = self.controller.activate_step_by_batch(batch_size)
        else:  # a choice lasts until a round has run with it
            shape = self.choice.shape
        try:
            line = self._lines[shape]
        except (KeyError, TypeError):  # an object that cannot be a key is no shape
            raise ConfigError(
                f"for a batch of {batch_size} the controller chose {shape!r:.80}, which is "
                f"none of its candidates {', '.join(map(str, self._lines))}"
            ) from None
        self.choice, self._is_open = Choice(shape, batch_size), True
        return self._following[line], self._order[line]

    def run(self) -> Choice | None:
        """Count a round that was prepared with the choice, and return the choice."""
        if self.choice is not None:
            shape = self.choice.shape
            self.switch_ct += self._ran not in (None, shape)
            self._ran, self._is_open = shape, False
        return self.choice

    def latest(self, rows: Sequence[int]) -> Int32:
        """Return the shapes of these rows by the latest choice, int32 [B]."""
        line = 0 if self.choice is None else self._lines[self.choice.shape]
        following: Int32 = self._following[line, rows]
        return following

    def learn(
        self,
        choice: Choice,
        shapes: Int32,
        accept_len: Int32,
        requests: Sequence[Request] = (),
    ) -> None:
        """Pass a round's results to the controller: each lane's shape, accept length and request.

        Lanes whose drafts were forced do not count: they say nothing about the drafter. No requests
        = there are none.
        """
        assert self.controller is not None
        self.round_cts[choice.shape] += 1
        chosen = shapes == self._index[choice.shape]
        if any(request.forced for request in requests):
            chosen &= np.array([not request.forced for request in requests], np.bool_)
        if chosen.any():
            num_correct_drafts = accept_len[chosen] - 1
            self.controller.on_verify_complete(choice.shape, choice.batch_size, num_correct_drafts)

    def observe(self, choice: Choice, shapes: Int32, seconds: float) -> None:
        """Pass to the controller the seconds of a turn that was this round alone.

        Rounds with lanes of other shapes do not count.
        """
        assert self.controller is not None
        if (shapes == self._index[choice.shape]).all():
            self.controller.on_round_seconds(choice.shape, len(shapes), seconds)

    def stats(self) -> AdaptiveStats | None:
        """Return the choices so far; None without a controller."""
        if self.controller is None:
            return None
        shape = None if self.choice is None else self.choice.shape
        return AdaptiveStats(shape, self.switch_ct, dict(self.round_cts))


def _capped(shape: Shape, shapes: Sequence[Shape], max_steps: int | None) -> Shape:
    """Return the shape, or the greatest of `shapes` with at most `max_steps` steps."""
    if max_steps is None or shape.num_steps <= max_steps:
        return shape
    fewer = [each for each in shapes if each.num_steps <= max_steps]
    return max(
        fewer, key=lambda each: (each.num_steps, each.num_draft_tokens), default=Shape.none()
    )


@dataclass(frozen=True, slots=True)
class AdaptiveStats:
    """The choices of a controller.

    Attributes:
        shape: the choice for the latest round; None = there was none.
        switch_ct: rounds whose choice differed from that of the round before.
        round_cts: rounds by the chosen shape.
    """

    shape: Shape | None
    switch_ct: int
    round_cts: dict[Shape, int]
