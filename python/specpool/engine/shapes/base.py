"""`Controller`: the protocol by which a scheduler gets the shape of each decode round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specpool._core import Shape

#: Rounds until a controller that compares costs chooses again.
CHOICE_ROUNDS = 4
NumCorrectDrafts = Sequence[int] | npt.NDArray[np.int32]


class Controller(Protocol):
    """The object that chooses each decode round's shape. Batch sizes count decoding rows only."""

    candidates: tuple[Shape, ...]
    """Every shape that it may choose, without duplicates."""

    def activate_step_by_batch(self, batch_size: int) -> Shape:
        """Return the shape of the next decode round, of `batch_size` rows."""

    def on_verify_complete(
        self, shape: Shape, batch_size: int, num_correct_drafts: NumCorrectDrafts
    ) -> Shape | None:
        """Learn from a round's result; return the shape that this switches to, or None.

        Args:
            shape: the round's shape; another one may be in use by now.
            batch_size: the round's batch size.
            num_correct_drafts: of each lane that drafted with this shape.
        """

    def on_round_seconds(self, shape: Shape, batch_size: int, seconds: float) -> None:
        """Learn from the seconds of a round."""
