"""Embeddings and output matrices that a head's file holds beside the target's own.

A file often holds a copy of the target's embedding, which is shared then. A table that differs was
trained with the head, and the head is of use with it alone (vLLM's pull request 28549: a mean
accept length of 1.32 without it, 2.49 with it).
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 8192  # compared at a time, so that no copy of a whole table is made


def is_copy(table: Tensor, targets: Tensor) -> bool:
    """Return whether a head's table holds the numbers of the target's, up to rounding.

    The two may be stored in different dtypes, so they may differ by the rounding of the coarser
    one. Rows that only one of them has are not compared.

    Args:
        table: [n, h], of the head's file.
        targets: [m, h], the target's.
    """
    coarser = max(torch.finfo(tensor.dtype).eps for tensor in (table, targets))
    num_rows = min(len(table), len(targets))
    for start in range(0, num_rows, _ROWS):
        rows = slice(start, min(start + _ROWS, num_rows))
        head_rows = table[rows].to(device=targets.device, dtype=torch.float32)
        if not torch.allclose(head_rows, targets[rows].float(), rtol=coarser, atol=1e-6):
            return False
    return True


def with_rows(table: Tensor, num_rows: int) -> Tensor:
    """Return a table of at least `num_rows` rows: its last row stands for those that it lacks."""
    lacking = num_rows - len(table)
    return table if lacking <= 0 else torch.cat([table, table[-1:].expand(lacking, -1)])
