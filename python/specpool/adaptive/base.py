"""`Controller`: what a scheduler asks before a decode round, and tells after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specpool._core import Shape

NumCorrectDrafts = Sequence[int] | npt.NDArray[np.int32]


class Controller(Protocol):
    """Picks the shape of each decode round; batch sizes count decodes only."""

    candidates: tuple[Shape, ...]
    """Every shape that it may answer, no duplicates."""

    def activate_step_by_batch(self, batch_size: int) -> Shape:
        """The shape of the decode round to come, of `batch_size` rows."""

    def on_verify_complete(
        self, shape: Shape, batch_size: int, num_correct_drafts: NumCorrectDrafts
    ) -> Shape | None:
        """Take over a round's result; returns the shape that was switched to, or None.

        Args:
            shape: what that round drafted; another one may be in use by now.
            batch_size: that round's.
            num_correct_drafts: of its lanes that drafted.
        """

    def on_round_seconds(self, shape: Shape, batch_size: int, seconds: float) -> None:
        """A round took so long."""
