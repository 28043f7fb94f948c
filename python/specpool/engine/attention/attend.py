"""`attend`: computes the attention of one layer over the views of a forward."""

from __future__ import annotations

import torch
from torch import Tensor

from specpool.engine.attention import torch_backend
from specpool.engine.attention.view import JoinedView, View


def attend(
    view: View,
    k_buffer: Tensor,
    v_buffer: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write a layer's new keys and values to pages, and compute its attention over them.

    Args:
        view: the slots to write and the cells to read; T tokens in B lanes.
        k_buffer: [num_slots, Hkv, Dk], contiguous, num_slots a multiple of the page size; written.
        v_buffer: [num_slots, Hkv, Dv], likewise.
        q: [T, H, Dk] queries, H a multiple of Hkv, positions already applied.
        k: [T, Hkv, Dk] new keys, written to ``view.write_slots`` before anything is read.
        v: [T, Hkv, Dv] new values.
        scaling: factor of the scores.
        window: a query sees the last `window` positions, its own included; None means all.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).
        sinks: [H] extra scores that take part in the softmax only (gpt-oss).

    Returns:
        [T, H, Dv] in the dtype of q.
    """
    if isinstance(view, JoinedView):
        outs, start = [], 0
        for part in view.views:
            tokens = slice(start, start + part.num_tokens)
            start = tokens.stop
            outs.append(
                attend(
                    part,
                    k_buffer,
                    v_buffer,
                    q[tokens],
                    k[tokens],
                    v[tokens],
                    scaling=scaling,
                    window=window,
                    softcap=softcap,
                    sinks=sinks,
                )
            )
        return torch.cat(outs)
    run = torch_backend.attend if view.attend_with is None else view.attend_with
    return run(
        view,
        k_buffer,
        v_buffer,
        q,
        k,
        v,
        scaling=scaling,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
