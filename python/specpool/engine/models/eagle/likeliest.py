"""`likeliest`: the most probable tokens of logits, in an order that no device changes."""

from __future__ import annotations

import torch

from specpool import kernels


def likeliest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k most probable tokens of each row of logits [n, V], best first.

    Among equally probable tokens the lower id comes first, on every device. A probability that is
    not a number counts as 0.

    Returns:
        Probabilities float32 [n, k], and ids int64 [n, k].
    """
    p = torch.softmax(logits, -1, dtype=torch.float32)
    if k == 1:  # without the cost of an order; the token is the one that chains take without `p`
        ids = logits.argmax(-1, keepdim=True)
        return p.gather(1, ids).nan_to_num_(nan=0.0), ids
    return kernels.likeliest(p, k)
