"""`TargetOutput`: what one forward of a target gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class TargetOutput:
    """What one forward gives."""

    logits: Tensor  # [n, V], n = len(logits_index), or T without one
    hidden: Tensor  # [T, h], after the final norm
    features: Tensor | None  # [T, sum of the captured widths], in the order of `capture`
