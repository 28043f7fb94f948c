"""Doubles of torch's fused attention kernels, and what a test may ask of an attention call.

The kernels run on a GPU alone. The doubles follow their documentation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specpool.attention import AttentionView, fused, torch_backend


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
    """Attend lane by lane; the last query sees the last of the `used` cells, or each sees all."""
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.inf)
    groups = q.shape[1] // keys.shape[1]
    for lane, kv_len in enumerate(used.tolist()):
        first, end = q_starts[lane : lane + 2].tolist()
        at = int(k_starts[lane])
        assert at + kv_len <= int(k_starts[lane + 1]) <= len(keys)
        k, v = (x[at : at + kv_len].repeat_interleave(groups, 1).double() for x in (keys, values))
        for i in range(first, end):
            last = kv_len - (end - i) if is_causal else kv_len - 1
            lo = 0 if window is None else max(0, last - window + 1)
            scores = torch.einsum("hd,lhd->hl", q[i].double(), k[lo : last + 1]) * scaling
            out[i] = torch.einsum("hl,lhd->hd", scores.softmax(1), v[lo : last + 1]).to(q.dtype)
            if kv_len:
                lse[:, i] = scores.logsumexp(1)
    return out, lse


def flash(q, k, v, q_starts, k_starts, max_q, max_k, dropout, causal, debug, **options) -> Any:
    assert q.dtype in (torch.float16, torch.bfloat16) and (dropout, debug) == (0, False)
    used = options["seqused_k"]
    assert max_q == q_starts.diff().max() and max_k >= used.max()
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


def reading(counts: list[Tensor], page_size: int) -> Any:
    """A reader that notes how many pages it reads of each of three lanes, and spoils the rest."""

    def read(keys: Tensor, values: Tensor, pages: Tensor) -> list[Tensor]:
        assert pages.dtype == torch.int32
        counts.append((pages.view(3, -1) >= 0).sum(1))
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
