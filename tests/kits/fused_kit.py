"""Doubles of torch's fused attention kernels, and what a test may ask of an attention call.

The kernels run on a GPU alone. The doubles follow their documentation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

from specpool.engine.attention import AttentionView, fused, torch_backend


def varlen(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    used: Tensor,
    scaling: float,
    window: int | None,
    *,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attend; a lane's last query sees the last of its `used` cells, or each sees all of them.

    Nothing is read on the host while a graph is captured, so this runs in the double of graphs.
    """
    if not _len_torch_dispatch_stack():
        ends = k_starts[:-1] + used
        assert (ends <= k_starts[1:]).all() and k_starts[-1] <= len(keys)
    queries, cells = torch.arange(len(q)), torch.arange(len(keys))
    lanes = (torch.searchsorted(q_starts, queries, right=True) - 1).clamp(max=len(used) - 1)
    last = used[lanes] - 1
    if is_causal:
        last = last + 1 - (q_starts[lanes + 1] - queries)
    places = cells - k_starts[lanes].unsqueeze(1)  # [T, n], of each cell in the query's lane
    sees = (places >= 0) & (places <= last.unsqueeze(1))
    if window is not None:
        sees &= places > (last - window).unsqueeze(1)
    groups = q.shape[1] // keys.shape[1]
    is_read = sees.any(0).view(-1, 1, 1)  # the others may hold anything
    k, v = (
        part.masked_fill(~is_read, 0).unsqueeze(2).expand(-1, -1, groups, -1).flatten(1, 2).double()
        for part in (keys, values)
    )
    scores = torch.einsum("thd,nhd->htn", q.double(), k) * scaling
    scores = scores.masked_fill(~sees, -torch.inf)
    is_empty = ~sees.any(1)
    weights = scores.softmax(2).masked_fill(is_empty.view(1, -1, 1), 0)
    out = torch.einsum("htn,nhd->thd", weights, v).to(q.dtype)
    lse = scores.logsumexp(2).masked_fill(is_empty, torch.inf)
    is_no_query = queries >= q_starts[-1]
    return out.masked_fill(is_no_query.view(-1, 1, 1), torch.nan), lse.to(torch.float32)


def flash(q, k, v, q_starts, k_starts, max_q, max_k, dropout, causal, debug, **options) -> Any:
    assert q.dtype in (torch.float16, torch.bfloat16) and (dropout, debug) == (0, False)
    used = options["seqused_k"]
    assert _len_torch_dispatch_stack() or (max_q == q_starts.diff().max() and max_k >= used.max())
    left, right = options["window_size_left"], options["window_size_right"]
    assert right == (-1 if left == -1 else 0)  # -1: unlimited
    window = None if left == -1 else left + 1
    lens = (q_starts, k_starts, used)
    return varlen(q, k, v, *lens, options["scale"], window, is_causal=causal)


def efficient(q, k, v, bias, q_starts, k_starts, max_q, max_k, dropout, kind, **options) -> Any:
    assert len(q) == 1 and q.shape[2] == k.shape[2], "it groups no heads"
    assert bias is None and dropout == 0 and kind == 2  # causal, aligned to the last key
    used = options["seqlen_k"]
    assert max_q == q_starts.diff().max() and max_k >= used.max()
    out, _ = varlen(
        q[0], k[0], v[0], q_starts, k_starts, used, options["scale"], options["window_size"]
    )
    return (out[None],)


def use_doubles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the doubles on CPU tensors; say which ran."""
    ran: list[str] = []

    def noting(run: Any) -> Any:
        return lambda *args, **options: (ran.append(run.__name__), run(*args, **options))[1]

    monkeypatch.setattr(torch_backend.in_place, "serves_in_place", lambda *args: False)
    monkeypatch.setattr(fused, "DEVICE", "cpu")
    monkeypatch.setattr(fused, "_flash", noting(flash))
    monkeypatch.setattr(fused, "_efficient", noting(efficient))
    return ran


def inputs(view: AttentionView, heads: int, dtype: torch.dtype, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(view.num_tokens, n, dim, generator=generator).to(dtype) for n in (heads, 2, 2)
    ]


def reading(counts: list[tuple[int, int]], page_size: int) -> Any:
    """A reader that notes how many pages it reads, and its room; it spoils the rest."""

    def read(keys: Tensor, values: Tensor, pages: Tensor) -> list[Tensor]:
        assert pages.dtype == torch.int32 and pages.is_contiguous()
        counts.append((int((pages >= 0).sum()), len(pages)))
        return [
            torch.where(
                (pages >= 0).view(-1, 1),
                buffer.view(-1, page_size * buffer[0].numel())[pages.long().clamp(min=0)],
                torch.nan,
            )
            for buffer in (keys, values)
        ]

    return read


class Ops(TorchDispatchMode):
    """The names of all operations within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
