"""`TargetOutput`: the result of one forward of a target."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class TargetOutput:
    """The result of one forward of T tokens."""

    logits: Tensor  # [n, V], n = len(logits_index), or T without one
    hidden: Tensor  # [T, h], after the final norm
    features: Tensor | None  # [T, sum of the captured widths], in the order of `capture`
