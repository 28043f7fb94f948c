"""`RoundShapes`: which shape the next round of each row has."""

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


# A row's place among the lanes: its shape, then the number of its admission.
_ORDER_BITS = 48


@dataclass(frozen=True, slots=True)
class Choice:
    """What a controller has chosen for a round."""

    shape: Shape
    batch_size: int  # rows that decode


class RoundShapes:
    """Each row's shape, given what the controller chooses: its own, or the choice as far as it may.

    Attributes:
        controller: chooses the shape of each round; None = there is none.
        choice: for the latest round, or the next one that was tried; None = there was none.
        switch_ct: rounds whose choice was another than the round's before.
        round_cts: rounds by what was chosen.
        all_choices: what `Request.choices` can be: without a cap, then with each that matters.
    """

    def __init__(
        self, shapes: Sequence[Shape], num_rows: int, controller: Controller | None
    ) -> None:
        """No row has a request; indices count `shapes`, the ledger's.

        Raises:
            ConfigError: a candidate of the controller is none of them.
        """
        self.controller = controller
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
        # By choice and row. Without a controller there is one choice.
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
        """For a request that names no shape, and drafts at most so many steps.

        Returns:
            A shape of it, and `Request.shape_index` and `choices`.
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

    def _choices(self, max_steps: int | None) -> tuple[int, ...]:
        """The shape for each of the controller's candidates, of so many steps at most."""
        candidates = [*self._lines]
        return tuple(self._index[_capped(shape, candidates, max_steps)] for shape in candidates)

    def admit(self, row: int, shapes: int | tuple[int, ...], admission: int) -> None:
        """The row has a request, so many after the first; `shapes` as in `put`."""
        self._admission[row] = admission
        self.put(row, shapes)

    def put(self, row: int, shapes: int | tuple[int, ...]) -> None:
        """The row's shape, or that for each of the controller's candidates; 0 = none."""
        self._following[:, row] = shapes
        place = self._following[:, row].astype(np.int64) << _ORDER_BITS
        self._order[:, row] = place | self._admission[row]

    def choose(self, limits: Int32) -> tuple[Int32, Int64]:
        """The shape of each row's round if it runs now, and its place among the lanes.

        Args:
            limits: int32 [num_rows], not 0 where a row decodes.

        Returns:
            int32 [num_rows], and int64 [num_rows]: lanes of one shape stand side by side, in the
            order of admission.

        Raises:
            ConfigError: the controller has answered what is no candidate of it.
        """
        batch_size = 0 if self.controller is None else int(np.count_nonzero(limits))
        if self.controller is None or not batch_size:
            return self._following[0], self._order[0]
        if self.choice is None or not self._is_open:
            shape = self.controller.activate_step_by_batch(batch_size)
        else:  # it is good for one round, whenever that finds rows and pages
            shape = self.choice.shape
        try:
            line = self._lines[shape]
        except (KeyError, TypeError):  # what cannot be a key is no shape either
            raise ConfigError(
                f"for a batch of {batch_size} the controller chose {shape!r:.80}, which is "
                f"none of its candidates {', '.join(map(str, self._lines))}"
            ) from None
        self.choice, self._is_open = Choice(shape, batch_size), True
        return self._following[line], self._order[line]

    def run(self) -> Choice | None:
        """A round is prepared as was chosen; returns the choice."""
        if self.choice is not None:
            shape = self.choice.shape
            self.switch_ct += self._ran not in (None, shape)
            self._ran, self._is_open = shape, False
        return self.choice

    def latest(self, rows: Sequence[int]) -> Int32:
        """int32 [B], of these rows as the latest round would have them, whether it ran or not."""
        line = 0 if self.choice is None else self._lines[self.choice.shape]
        following: Int32 = self._following[line, rows]
        return following

    def learn(self, choice: Choice, shapes: Int32, accept_len: Int32) -> None:
        """The results of a round: int32 [B], each lane's shape and accept length."""
        assert self.controller is not None
        self.round_cts[choice.shape] += 1
        chosen = shapes == self._index[choice.shape]
        if chosen.any():
            num_correct_drafts = accept_len[chosen] - 1
            self.controller.on_verify_complete(choice.shape, choice.batch_size, num_correct_drafts)

    def observe(self, choice: Choice, shapes: Int32, seconds: float) -> None:
        """How long a turn took that was this round alone, lanes of one shape."""
        assert self.controller is not None
        if (shapes == self._index[choice.shape]).all():
            self.controller.on_round_seconds(choice.shape, len(shapes), seconds)

    def stats(self) -> AdaptiveStats | None:
        """What was chosen so far; None without a controller."""
        if self.controller is None:
            return None
        shape = None if self.choice is None else self.choice.shape
        return AdaptiveStats(shape, self.switch_ct, dict(self.round_cts))


def _capped(shape: Shape, shapes: Sequence[Shape], max_steps: int | None) -> Shape:
    """The shape, or else the greatest of those with fewer steps."""
    if max_steps is None or shape.num_steps <= max_steps:
        return shape
    fewer = [each for each in shapes if each.num_steps <= max_steps]
    return max(
        fewer, key=lambda each: (each.num_steps, each.num_draft_tokens), default=Shape.none()
    )


@dataclass(frozen=True, slots=True)
class AdaptiveStats:
    """What a controller has chosen.

    Attributes:
        shape: for the latest round; None = there was none.
        switch_ct: rounds for which another shape was chosen than for the round before.
        round_cts: rounds by what was chosen.
    """

    shape: Shape | None
    switch_ct: int
    round_cts: dict[Shape, int]
